"""Shrink the models and record every real script's run. Python runs this module at startup.

It counts calls of torch's checkpoint. Environment variables enable more: SPY_MEMORY records memory and FLOPs of every step,
SPY_LOSSES records losses and compiled graphs, SPY_MASKS counts calls of attention, and SPY_OUT_OF_MEMORY_AT makes blocks run
out of memory, in the process SPY_ONLY_RANK if that is set. SPY_COLLECTIVES records the collective operations of every batch.
REPLAY_ON_CPU replaces CUDA graphs by a replayer of operations, and lets --speed choose on the CPU: TRIAL_CHOOSES names the
features that its trial finds fastest, separated by commas, and SELF_TEST_FAILS one that fails its self-test. TRIAL_COMPILES
gives the trial time to compile blocks. LOSES_GPU names the features whose trial ends the process's use of the GPU.
SPY_PROFILER_FAILS makes torch's profiler fail. TRITON_INTERPRET lets optimizers' kernels run on the CPU.
WRAP_AS_ON_GPUS lets upstream's LoRA scripts run in several processes on a CPU. DEEPSPEED_ON_CPU lets accelerate use DeepSpeed
there. COMPILE_BACKEND is torch.compile's backend for the blocks. BREAK breaks compiling: with an old version (``torch``),
changed Lumina blocks (``layout``) or a failing ``backend``, called "broken", in the first step.
FAIL_IN=PLACE:CALL raises an exception in the call of that number of a function (PLACES).
"""

import atexit
import collections
import contextlib
import functools
import json
import os
import sys
import types

import wrapt

from kohya_ext.tiny import shrink

shrink.install()
calls = collections.Counter()
steps = []
left = []
losses = []
graphs = []
collectives = []
weights = {}
masks = collections.Counter()

#: Training batch at which every block that is not checkpointed runs out of memory in forward.
OUT_OF_MEMORY = int(os.environ.get("SPY_OUT_OF_MEMORY_AT", 0))
if os.environ.get("RANK", "0") != os.environ.get("SPY_ONLY_RANK", os.environ.get("RANK", "0")):
    OUT_OF_MEMORY = 0


def spy(module):
    original = module.checkpoint
    if hasattr(original, "spied"):
        return

    def checkpoint(function, *args, use_reentrant=None, **kwargs):
        calls["reentrant" if use_reentrant is not False else "non-reentrant"] += 1
        return original(function, *args, use_reentrant=use_reentrant, **kwargs)

    checkpoint.spied = True
    module.checkpoint = checkpoint


def measure_memory(module):
    """Record peak bytes and FLOPs of every batch and its optimizer step, and the bytes that it leaves to the next one."""
    original = module.Accelerator.accumulate
    records = []

    @contextlib.contextmanager
    def accumulate(self, *models):
        from kohya_ext.dry_run.tracker import Allocations
        from kohya_ext.gpu.memory_meter import HostMemoryMeter

        meter, record = HostMemoryMeter(), Allocations()
        meter.begin()
        if records:
            left.append(records.pop().alive)
        records.append(record)
        with original(self, *models), record:
            yield
        steps.append((meter.end(), record.flops))

    module.Accelerator.accumulate = accumulate


def record_losses(module):
    original = module.Accelerator.backward

    @functools.wraps(original)
    def backward(self, loss, **kwargs):
        losses.append(loss.item())
        original(self, loss, **kwargs)
        dynamo = sys.modules.get("torch._dynamo.utils")
        graphs.append(dynamo.counters["stats"]["unique_graphs"] if dynamo else 0)

    module.Accelerator.backward = backward


def count_masks(module):
    original = module.scaled_dot_product_attention

    @functools.wraps(original)
    def attend(*args, attn_mask=None, **kwargs):
        masks["unmasked" if attn_mask is None else "masked"] += 1
        return original(*args, attn_mask=attn_mask, **kwargs)

    module.scaled_dot_product_attention = attend


def record_collectives(module):
    """Record (operation, data type, bytes) of the collective operations from each batch to the next one.

    The bytes are those of a whole tensor: the input of an all-reduce or a reduce-scatter, the output of an all-gather.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            if collectives and operation.namespace == "c10d":
                name = operation._schema.name.removeprefix("c10d::")
                tensors = largest(args[:2])
                if tensors:
                    collectives[-1].append((name, str(tensors[0].dtype), sum(map(size, tensors))))
            return operation(*args, **(kwargs or {}))

    def size(tensor):
        return tensor.numel() * tensor.element_size()

    def largest(values):
        flat = [list(tensors_of(value)) for value in values]
        return max(flat, key=lambda tensors: sum(map(size, tensors)), default=[])

    def tensors_of(value):
        if isinstance(value, module.torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            for each in value:
                yield from tensors_of(each)

    init, accumulate = module.Accelerator.__init__, module.Accelerator.accumulate

    @functools.wraps(init)
    def begin(self, *args, **kwargs):
        init(self, *args, **kwargs)
        Record().__enter__()

    @functools.wraps(accumulate)
    def next_batch(self, *models):
        if not collectives:
            every = [weight for model in self._models for weight in model.parameters()]
            for weight in every:
                numel = getattr(weight, "ds_numel", weight.numel())
                weights["all"] = weights.get("all", 0) + numel
                weights["trained"] = weights.get("trained", 0) + numel * weight.requires_grad
                weights["tensors"] = weights.get("tensors", 0) + weight.requires_grad
        collectives.append([])
        return accumulate(self, *models)

    module.Accelerator.__init__ = begin
    module.Accelerator.accumulate = next_batch


def exhaust_memory(module):
    batches = 0
    body = module.BasicTransformerBlock.forward_body
    forward = module.SdxlUNet2DConditionModel.forward

    @functools.wraps(body)
    def forward_body(self, *args, **kwargs):
        import torch

        result = body(self, *args, **kwargs)
        if batches == OUT_OF_MEMORY and not self.gradient_checkpointing and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return result

    @functools.wraps(forward)
    def count(self, *args, **kwargs):
        nonlocal batches
        batches += 1
        return forward(self, *args, **kwargs)

    module.BasicTransformerBlock.forward_body = forward_body
    module.SdxlUNet2DConditionModel.forward = count


def skip_self_test(module):
    module.machine = lambda device: {"gpu": "a CPU"}
    fails = os.environ.get("SELF_TEST_FAILS")
    module.problems = lambda machine, names, *_: {
        name: "it computes wrong numbers" if name == fails else None for name in names
    }


def decide_trial(module):
    """Give the trial of a short run time, and choose by name."""
    module.MOST_SECONDS = module.SHARE = 1e9
    chosen = tuple(name for name in os.environ["TRIAL_CHOOSES"].split(",") if name)
    module._SHARE_OF_LAYERS = 0  # one layer of each kind takes seconds
    module.LEAST_SECONDS_OF_COMPILING = 0 if "TRIAL_COMPILES" in os.environ else 1e99
    module.choose = lambda candidates: next(each for each in candidates if each.features == chosen)


def lose_gpu(module):
    compared = module.Trial._compared

    def fail(self, candidate, *args):
        if candidate.features == (os.environ["LOSES_GPU"],):
            self.is_lost = lambda: True
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return compared(self, candidate, *args)

    module.Trial._compared = fail


def compile_in_any_case(module):
    """Compile the blocks of a known choice, which takes longer here than a tiny run."""
    module._without_setup = lambda known, passes: known


def replay_on_cpu(module):
    from tests.replayer import CpuRecorder

    module.CudaRecorder = CpuRecorder


def swap_on_cpu(module):
    """Let the patch take a CPU for a GPU, with streams whose copies are early or late."""
    import torch

    from tests.streams import Now, Streams, to_device

    module._is_possible = lambda device: True
    module.proof.problems = lambda machine, names, start, report: dict.fromkeys(names)
    module.proof.machine = lambda device: {}
    begin = module._Swaps._begin

    def with_streams(self, offloader, blocks):
        sys.modules["library.custom_offloading_utils"].weighs_to_device = to_device
        offloader.device, offloader.thread_pool = torch.device("cpu:0"), Now()
        return begin(self, offloader, blocks)

    module._Swaps._begin = with_streams
    Streams(os.environ["SWAP_ON_CPU"] == "late").install()


def keep_states_on_cpu(module):
    """Let the patch take a CPU for a GPU, with streams whose copies are early or late."""
    from tests.streams import Streams

    module._has_streams = lambda device: True
    Streams(os.environ["STATES_ON_CPU"] == "late").install()


def interpret_steps(module):
    """Let Triton's interpreter run the kernels on the CPU."""
    from kohya_ext.kernels import adafactor_kernels

    module.kernels_on, module.LEAST = lambda *_: adafactor_kernels, 1


def interpret_adamw(module):
    """The same for AdamW."""
    from kohya_ext.kernels import adamw_kernels

    module.kernels_on = lambda *_: adamw_kernels


def break_profiler(module):
    def fail(self):
        raise RuntimeError("no profiler here")

    module.profile.start = fail


def write():
    if (calls or steps or losses or collectives) and os.environ.get("RANK", "0") == "0":
        lists = {
            "steps": steps,
            "left": left,
            "losses": losses,
            "graphs": graphs,
            "collectives": collectives,
            "weights": weights,
            "masks": masks,
        }
        recorded = {name: values for name, values in lists.items() if values}
        with open(os.environ["SPY_FILE"], "w") as file:
            json.dump({**calls, **recorded}, file)


def age_torch(version):
    version.__version__ = "2.4.1"


def change_layout(models):
    """Make the method an attribute of each block, not of its class."""
    block = models.JointTransformerBlock
    init, method = block.__init__, block._forward
    del block._forward

    @functools.wraps(init)
    def init_with_method(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self._forward = types.MethodType(method, self)

    block.__init__ = init_with_method


def wrap_as_on_gpus(module):
    """Return a frozen model unwrapped from DistributedDataParallel, which accelerate does not call for it on GPUs."""
    original = module.DistributedDataParallel

    class OfTrainedModels(original):
        def __new__(cls, model, **kwargs):
            is_trained = any(weight.requires_grad for weight in model.parameters())
            return super().__new__(cls) if is_trained else model

    module.DistributedDataParallel = OfTrainedModels


def allow_deepspeed_on_cpu(module):
    """Let accelerate use gloo for DeepSpeed. Without a GPU it has no backend, and with ACCELERATE_USE_CPU no DeepSpeed."""
    original = module.PartialState._prepare_backend
    module.PartialState._prepare_backend = lambda self, cpu=False, *rest: original(self, True, *rest)


def partition_small_weights(module):
    """Let ZeRO-3 divide tiny weights, too, and forget them within a tiny model.

    By default it keeps weights of less than 100,000 elements whole, and gathered ones for the next 1e9 elements.
    """
    original = module.initialize

    @functools.wraps(original)
    def initialize(*args, config_params, **kwargs):
        config_params["zero_optimization"]["stage3_param_persistence_threshold"] = 1000
        if "REUSE_DISTANCE" in os.environ:
            config_params["zero_optimization"]["stage3_max_reuse_distance"] = int(os.environ["REUSE_DISTANCE"])
            config_params["zero_optimization"]["stage3_prefetch_bucket_size"] = 0  # what it fetches ahead is kept, too
        return original(*args, config_params=config_params, **kwargs)

    module.initialize = initialize


def set_backend(blocks):
    blocks.RUN.backend = os.environ["COMPILE_BACKEND"]


def add_broken_backend(registry):
    """Register a backend that fails at the second graph."""
    compiled = []

    def broken(graph_module, inputs):
        compiled.append(graph_module)
        if len(compiled) > 1:
            raise RuntimeError("the compiler has had enough")
        return registry.lookup_backend("aot_eager")(graph_module, inputs)

    registry.register_backend(broken, "broken")


def fail_in_call(number, applies=lambda *args, **kwargs: True):
    """Return a decorator: the function raises in the call of that number, counted from 1, that ``applies``."""
    calls = 0

    def decorate(function):
        @functools.wraps(function)
        def fail(*args, **kwargs):
            nonlocal calls
            calls += bool(applies(*args, **kwargs))
            if calls == number and applies(*args, **kwargs):
                raise ValueError("injected")
            return function(*args, **kwargs)

        return fail

    return decorate


def is_sample(image, file, *args, **kwargs):
    return "sample" in str(file)


def is_validation(*args, is_train=True, **kwargs):
    return not is_train


def is_training_loss(tracker, values, *args, **kwargs):
    return "loss" in values or "loss/current" in values


def trains(*args, **kwargs):
    return sys.modules["torch"].is_grad_enabled()


def is_training_data(data_set, index):
    return getattr(data_set, "is_training_dataset", True)


#: Place -> modules, attribute, and which calls count. A module or attribute that is missing is left out.
PLACES = {
    "sampling": (("library.sampling", "library.train_util"), "sample_image_inference"),
    "sample_file": (("PIL.Image",), "Image.save", is_sample),
    "validation": (("train_network",), "NetworkTrainer.process_batch", is_validation),
    "full_validation": (("kohya_ext.patching.step_loss",), "StepLoss.of"),
    "tracker": (("accelerate.tracking",), "TensorBoardTracker.log", is_training_loss),
    "journal": (("kohya_ext.run.journal",), "Journal.write"),
    "data": (("library.dataset", "library.train_util"), "BaseDataset.__getitem__", is_training_data),
    "forward": (("library.sdxl_original_unet",), "SdxlUNet2DConditionModel.forward", trains),
    "log": (("accelerate.accelerator",), "Accelerator.log", is_training_loss),
    "step": (("accelerate.optimizer",), "AcceleratedOptimizer.step"),
    "schedule": (("accelerate.scheduler",), "AcceleratedScheduler.step"),
}


def add_failure(module, attribute, decorate):
    *path, name = attribute.split(".")
    owner = functools.reduce(lambda owner, part: getattr(owner, part, None), path, module)
    if owner is not None and name in vars(owner):
        setattr(owner, name, decorate(vars(owner)[name]))


BREAKAGES = {
    "backend": ("torch._dynamo.backends.registry", add_broken_backend),
    "torch": ("torch.version", age_torch),
    "layout": ("library.lumina_models", change_layout),
}

if "COMPILE_BACKEND" in os.environ:
    wrapt.register_post_import_hook(set_backend, "kohya_ext.compiling.blocks")
if "BREAK" in os.environ:
    name, apply_breakage = BREAKAGES[os.environ["BREAK"]]
    wrapt.register_post_import_hook(apply_breakage, name)
wrapt.register_post_import_hook(spy, "torch.utils.checkpoint")
# It holds its own reference, and a forked run has already imported it.
wrapt.register_post_import_hook(spy, "transformers.modeling_utils")
if "SPY_MEMORY" in os.environ:
    wrapt.register_post_import_hook(measure_memory, "accelerate.accelerator")
if "SPY_LOSSES" in os.environ:
    wrapt.register_post_import_hook(record_losses, "accelerate.accelerator")
if "SPY_MASKS" in os.environ:
    wrapt.register_post_import_hook(count_masks, "torch.nn.functional")
if "SPY_COLLECTIVES" in os.environ:
    wrapt.register_post_import_hook(record_collectives, "accelerate.accelerator")
if "REPLAY_ON_CPU" in os.environ:
    wrapt.register_post_import_hook(replay_on_cpu, "kohya_ext.compiling.cuda_recorder")
    wrapt.register_post_import_hook(skip_self_test, "kohya_ext.speed.proof")
if "SWAP_ON_CPU" in os.environ:
    wrapt.register_post_import_hook(swap_on_cpu, "kohya_ext.patches.one_way_block_swap")
if "STATES_ON_CPU" in os.environ:
    wrapt.register_post_import_hook(keep_states_on_cpu, "kohya_ext.patches.gradient_release")
if "TRITON_INTERPRET" in os.environ:
    wrapt.register_post_import_hook(interpret_steps, "kohya_ext.kernels.adafactor")
    wrapt.register_post_import_hook(interpret_adamw, "kohya_ext.kernels.adamw")
if "TRIAL_CHOOSES" in os.environ:
    wrapt.register_post_import_hook(decide_trial, "kohya_ext.speed.trial")
if "LOSES_GPU" in os.environ:
    wrapt.register_post_import_hook(lose_gpu, "kohya_ext.speed.trial")
if "TRIAL_COMPILES" in os.environ:
    wrapt.register_post_import_hook(compile_in_any_case, "kohya_ext.patches.speed")
if "SPY_PROFILER_FAILS" in os.environ:
    wrapt.register_post_import_hook(break_profiler, "torch.profiler.profiler")
if "WRAP_AS_ON_GPUS" in os.environ:
    wrapt.register_post_import_hook(wrap_as_on_gpus, "torch.nn.parallel")
if "DEEPSPEED_ON_CPU" in os.environ:
    wrapt.register_post_import_hook(allow_deepspeed_on_cpu, "accelerate.state")
    wrapt.register_post_import_hook(partition_small_weights, "deepspeed")
if "FAIL_IN" in os.environ and os.environ.get("RANK", "0") == os.environ.get("SPY_ONLY_RANK", os.environ.get("RANK", "0")):
    place, _, call_number = os.environ["FAIL_IN"].partition(":")
    failing_modules, failing, *counts = PLACES[place]
    decorator = fail_in_call(int(call_number), *counts)
    for each in failing_modules:
        wrapt.register_post_import_hook(functools.partial(add_failure, attribute=failing, decorate=decorator), each)
if OUT_OF_MEMORY:
    wrapt.register_post_import_hook(exhaust_memory, "library.sdxl_original_unet")
atexit.register(write)

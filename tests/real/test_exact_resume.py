"""A resume from each state of a run gives the file of the undisturbed run, bit for bit."""

import pytest

from tests.real.test_losing_nothing import FULL, LORA, same

torch = pytest.importorskip("torch")

WORDS = ("--shuffle_caption", "--caption_separator", " ")
WARM_UP = (*WORDS, "--token_warmup_step", "12", "--token_warmup_min", "1")
EPOCHS = ("--max_train_epochs", "2", "--save_every_n_epochs", "1", "--save_state")
MIDDLE = ("--save_every_n_steps", "11")
WORKERS = ("--max_data_loader_n_workers", "2")
TIMED = ("--save_state_every_n_minutes", "0", "--save_last_n_timed_states", "99")
SCHEDULE = ("--lr_scheduler", "cosine", "--lr_warmup_steps", "1")
FUSED = (*SCHEDULE, "--max_grad_norm", "0", "--save_every_n_steps", "2", "--save_state", "--max_train_steps", "4")
END_OF_EPOCH, IN_THE_SECOND, AFTER_TWO = "tiny-000001-state", "tiny-step00000011-state", "tiny-step00000002-state"

#: Case -> script, arguments, and the states to resume. An epoch has eight batches.
CASES = {
    "epochs": (LORA, (*WARM_UP, *EPOCHS, *MIDDLE), (END_OF_EPOCH, IN_THE_SECOND)),
    "epochs of a fine-tune": (FULL, (*WARM_UP, *EPOCHS, *MIDDLE), (END_OF_EPOCH, IN_THE_SECOND)),
    "epochs of FLUX": ("flux_train_network.py", (*WARM_UP, *EPOCHS, *MIDDLE), (END_OF_EPOCH, IN_THE_SECOND)),
    "epochs of SD 1.5": ("train_network.py", (*WARM_UP, *EPOCHS, *MIDDLE), (END_OF_EPOCH, IN_THE_SECOND)),
    "workers": (LORA, (*WORDS, *EPOCHS, *MIDDLE, *WORKERS), (END_OF_EPOCH, IN_THE_SECOND)),
    "persistent workers": (
        LORA,
        (*WORDS, *EPOCHS, "--save_every_n_steps", "9", *WORKERS, "--persistent_data_loader_workers"),
        (END_OF_EPOCH, "tiny-step00000009-state"),
    ),
    "schedule-free": (
        LORA,
        ("--optimizer_type", "RAdamScheduleFree", "--max_train_epochs", "2", *TIMED, "--save_every_n_steps", "6"),
        ("tiny-rolling00000003-state", "tiny-rolling00000010-state"),
    ),
    "ProdigyPlus": (
        LORA,
        ("--optimizer_type", "prodigyplus.ProdigyPlusScheduleFree", "--learning_rate", "1", "--max_train_epochs", "2", *TIMED),
        ("tiny-rolling00000010-state",),
    ),
    "GGPO": (
        "flux_train_network.py",
        ("--network_args", "ggpo_sigma=0.03", "ggpo_beta=0.01", "--save_every_n_steps", "2", "--save_state"),
        (AFTER_TWO,),
    ),
    "fused groups of SDXL": (FULL, (*FUSED, "--fused_optimizer_groups", "4"), (AFTER_TWO,)),
    "fused blocks of FLUX": ("flux_train.py", (*FUSED, "--blockwise_fused_optimizers"), (AFTER_TWO,)),
    "fused blocks of SD 3": ("sd3_train.py", (*FUSED, "--blockwise_fused_optimizers"), (AFTER_TWO,)),
    "fused blocks of Lumina": ("lumina_train.py", (*FUSED, "--blockwise_fused_optimizers"), (AFTER_TWO,)),
    "ControlNet of SDXL": (
        "sdxl_train_control_net.py",
        ("--save_every_n_steps", "2", "--save_state"),
        (AFTER_TWO,),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_resume_equals_the_undisturbed_run(checkout, train, case):
    script, options, states = CASES[case]
    undisturbed = train(checkout, script, *options)
    assert undisturbed.tensors
    different = {}
    for state in states:
        resumed = train(checkout, script, *options, "--resume", str(undisturbed.folder / state))
        if not same(resumed.tensors, undisturbed.tensors):
            different[state] = max(
                (tensor.double() - undisturbed.tensors[name].double()).abs().max().item()
                for name, tensor in resumed.tensors.items()
            )
    assert not different

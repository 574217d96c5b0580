"""Compare the memory of dry runs with that of the same command lines on a virtual GPU.

    python -m benchmarks.dry_runs [--only PATTERN] [--again]

Rows are runs without a preset for their script or options (other scripts, offloaded checkpoints, network modules and optimizers
of third parties, and a fork), and runs with sample images and with several processes; full_size.json has the presets. Models,
images and arguments are those of the dry run (kohya_ext/dry_run/arguments.py), so both have the same words. A row takes one to
five minutes and 2 to 6 GB of host memory.
LyCORIS must be installed for its row. Rows in the output file are left out, unless ``--again`` is given.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import full_size, results
from kohya_ext.config.command_line import CommandLine
from kohya_ext.dry_run import estimation, several_processes
from kohya_ext.dry_run.arguments import Arguments, Workload, caption_tokens
from kohya_ext.errors import UserError
from kohya_ext.sdscripts import families
from kohya_ext.sdscripts.checkouts import Checkout, find_or_fetch
from kohya_ext.tiny import environment

OUTPUT = results.FOLDER / "dry_runs.json"

SITE = Path(__file__).with_name("third_party")
"""Folder with a network module and an optimizer of nobody's package."""

_COMMON = "--mixed_precision bf16 --gradient_checkpointing --cache_latents --train_batch_size 1 --learning_rate 1e-4"
_SDXL = f"{_COMMON} --sdpa --no_half_vae --resolution 1024"
_RELEASE = f"{_SDXL} --cache_text_encoder_outputs --full_bf16 --max_grad_norm 0 --gradient_release"
_PART = "--optimizer_states_on_host --optimizer_states_on_host_ratio"
_SD15 = f"{_COMMON} --sdpa --resolution 512"
_INVERSION = "--token_string sks --init_word a --num_vectors_per_token 4 --optimizer_type AdamW8bit"
_SAMPLES = "--sample_prompts benchmarks/third_party/prompts.txt --sample_every_n_steps 1"


@dataclass(frozen=True)
class Row:
    """A command line without models, images and output, and a change of its script: the text replaced, and its replacement."""

    name: str
    command: str
    change: tuple[str, str, str] | None = None
    """File, text and replacement."""


#: A fork that keeps copies of the latents until the next step: 134 MB.
_CALL = "            noise_pred = self.call_unet("
_KEPT = (
    "train_network.py",
    _CALL,
    f"            self.kept = [latents.float().repeat(64, 1, 1, 1) for _ in range(32)]\n{_CALL}",
)

ROWS = (
    Row("ControlNet SD 1.5", f"train_control_net.py {_SD15} --optimizer_type AdamW8bit"),
    Row("ControlNet SDXL", f"sdxl_train_control_net.py {_SDXL} --optimizer_type AdamW8bit --cache_text_encoder_outputs"),
    Row("ControlNet FLUX", f"flux_train_control_net.py {_COMMON} --resolution 512 --optimizer_type AdamW8bit "
        "--cache_text_encoder_outputs --guidance_scale 1 --timestep_sampling sigmoid --model_prediction_type raw "
        "--blocks_to_swap 18"),
    Row("LLLite SDXL", f"sdxl_train_control_net_lllite.py {_SDXL} --optimizer_type AdamW8bit --cache_text_encoder_outputs "
        "--cond_emb_dim 32 --network_dim 64"),
    Row("LLLite Anima", f"anima_train_control_net_lllite.py {_COMMON} --resolution 1024 --optimizer_type AdamW8bit "
        "--attn_mode torch --cache_text_encoder_outputs --cond_emb_dim 32 --lllite_mlp_dim 64"),
    Row("textual inversion SD 1.5", f"train_textual_inversion.py {_SD15} {_INVERSION}"),
    Row("textual inversion SDXL", f"sdxl_train_textual_inversion.py {_SDXL} {_INVERSION}"),
    Row("LECO SD 1.5", "train_leco.py --network_module networks.lora --network_dim 8 --mixed_precision bf16 --sdpa "
        "--gradient_checkpointing --optimizer_type AdamW8bit --learning_rate 1e-4"),
    Row("LECO SDXL", "sdxl_train_leco.py --network_module networks.lora --network_dim 8 --mixed_precision bf16 --sdpa "
        "--gradient_checkpointing --optimizer_type AdamW8bit --learning_rate 1e-4"),
    Row("DreamBooth SD 1.5", f"train_db.py {_SD15} --optimizer_type AdamW8bit --stop_text_encoder_training 100"),
    Row("checkpoints offloaded by blocks, Anima", "anima_train_network.py --preset anima-lora/base --gradient_checkpointing "
        "--unsloth_offload_checkpointing"),
    Row("LyCORIS LoKr, SD 1.5", f"train_network.py {_SD15} --network_module lycoris.kohya --network_dim 16 --network_alpha 8 "
        "--network_args algo=lokr factor=8 preset=attn-mlp --optimizer_type AdamW8bit"),
    Row("network module of a third party, SD 1.5", f"train_network.py {_SD15} --network_train_unet_only --network_dim 16 "
        "--network_module bottleneck_network --optimizer_type AdamW"),
    Row("optimizer of a third party, SD 1.5", f"train_network.py {_SD15} --network_module networks.lora --network_dim 64 "
        "--optimizer_type three_averages.ThreeAverages"),
    Row("sample images, SDXL", f"sdxl_train_network.py --preset sdxl-lora/12gb {_SAMPLES}"),
    Row("sample images, Anima", f"anima_train_network.py --preset anima-lora/12gb {_SAMPLES}"),
    Row("two processes, fine-tune of SDXL", "sdxl_train.py --preset sdxl-finetune/base --full_bf16 --num_processes 2"),
    Row("two processes, LoRA of SDXL", "sdxl_train_network.py --preset sdxl-lora/16gb --num_processes 2"),
    Row("gradient release with AdamW, fine-tune of SDXL", f"sdxl_train.py {_RELEASE} --optimizer_type AdamW"),
    Row("gradient release with AdamW8bit, fine-tune of SDXL", f"sdxl_train.py {_RELEASE} --optimizer_type AdamW8bit"),
    Row("optimizer states on the host, fine-tune of SDXL",
        f"sdxl_train.py {_RELEASE} --optimizer_type AdamW --optimizer_states_on_host"),
    Row("fused steps of AdamW, fine-tune of SDXL", f"sdxl_train.py {_RELEASE} --optimizer_type AdamW --fused_operations"),
    Row("fused steps, a quarter of the states on the host, fine-tune of SDXL",
        f"sdxl_train.py {_RELEASE} --optimizer_type AdamW --fused_operations {_PART} 0.25"),
    Row("fused steps, half of the states on the host, fine-tune of SDXL",
        f"sdxl_train.py {_RELEASE} --optimizer_type AdamW --fused_operations {_PART} 0.5"),
    Row("a fork's script, SD 1.5", f"train_network.py {_SD15} --network_module networks.lora --network_dim 16 "
        "--optimizer_type AdamW8bit", _KEPT),
)  # fmt: skip


def measure(row: Row, checkout: Checkout, scratch: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Return what a row's dry run predicts and what its run on the virtual GPU used, in bytes."""
    if row.change is not None:
        checkout = changed(checkout, scratch / "fork", row.change)
    script, *words = shlex.split(row.command)
    command = CommandLine(checkout.script(script), words, os.environ)
    predicted = dry(checkout, command)
    used = run(checkout, command, scratch, given)
    return {"arguments": row.command, **compared(predicted, used)}


def dry(checkout: Checkout, command: CommandLine) -> dict[str, Any]:
    """Return the memory that a dry run predicts, and the seconds that it takes."""
    start = time.monotonic()
    result = estimation.measure(checkout, command)
    # The estimate's own figure is that of the phase with the most reserved memory.
    allocated = max(result["phase_peaks"].values())
    return {"allocated": allocated, "reserved": result["reserved"], "seconds": round(time.monotonic() - start)}


def compared(predicted: dict[str, Any], used: dict[str, Any]) -> dict[str, Any]:
    """Return both with the error of the prediction in percent."""
    errors = {kind: round(100 * (predicted[kind] / used[kind] - 1), 3) for kind in ("allocated", "reserved") if used.get(kind)}
    return {"predicted": predicted, "used": used, "error_percent": errors}


def changed(checkout: Checkout, folder: Path, change: tuple[str, str, str]) -> Checkout:
    """Return a copy of a checkout's code with a change."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(checkout.path, folder, ignore=shutil.ignore_patterns(".git"))
    file, text, replacement = folder / change[0], *change[1:]
    content = file.read_text(encoding="utf-8")
    if text not in content:
        raise UserError(f"{change[0]} has no line {text.strip()}")
    file.write_text(content.replace(text, replacement, 1), encoding="utf-8")
    return find_or_fetch(folder)


def run(checkout: Checkout, command: CommandLine, scratch: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Run the words of a dry run on the virtual GPU."""
    folder, workload = scratch / "run", Workload.of(command)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    words = Arguments(command, workload, folder).words()
    passes = full_size.STEPS * workload.micro_steps
    family = families.of(command.name, command.values)
    reads = family is not None and family.name in full_size.READS_INTEGERS
    tokens = caption_tokens(command.name, command.values, workload.size) if reads else 0
    worker = ["benchmarks.full_size_worker", str(passes), str(tokens), "0"]
    words = ["--sd-scripts", str(checkout.path), command.name, *words]
    processes = several_processes.variables(command.settings.num_processes or 1)
    variables = environment.variables(folder / "tokenizers") | processes
    used = full_size.run_worker(given, folder, full_size.LARGE_CARD, worker, words, variables, passes)
    return {name: used[name] for name in ("allocated", "reserved", "failed") if name in used}


def main() -> int:
    """Measure the rows that are not in the output file, and write it after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[full_size.launching()]
    )
    parser.add_argument("--only", default="", help="only rows whose names match this expression")
    parser.add_argument("--again", action="store_true", help="also the rows that are in the output file")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="default: dry_runs.json of the results")
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    checkout = find_or_fetch(given.sd_scripts)
    document = json.loads(given.output.read_text(encoding="utf-8")) if given.output.is_file() else {"rows": {}}
    rows = (row for row in ROWS if re.search(given.only, row.name) and (given.again or row.name not in document["rows"]))
    with tempfile.TemporaryDirectory() as temporary:
        for row in rows:
            try:
                measured = measure(row, checkout, given.scratch or Path(temporary), given)
            except UserError as error:
                measured = {"error_percent": {}, "used": {"failed": str(error)}}
            document["rows"][row.name] = measured
            print(f"{row.name}: {measured['error_percent']} {measured['used'].get('failed', '')}", file=sys.stderr, flush=True)
            document |= {"sd_scripts": checkout.version, **results.kohya_ext_commit()}
            given.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Merge LoRA adapters into their base models, because evaluations and figures load whole models."""

import json
import shutil
from pathlib import Path

from arlopti_openrlhf.lab.scoring.inputs import ADAPTER
from arlopti_openrlhf.lab.scoring.offline import version_of

_MADE = "merged_from.json"  # the version of the adapter, written last


def merged(model: str, folder: Path) -> str:
    """Return a model as it is, or for a folder with an adapter, `folder` with the whole model in it.

    What an earlier call has merged of the same adapter stays.

    Raises:
        ValueError: the adapter or its base model cannot be loaded.
    """
    adapter = Path(model)
    if not (adapter / ADAPTER).exists():
        return model
    version = json.dumps(version_of(model))
    if not (folder / _MADE).is_file() or (folder / _MADE).read_text("utf-8") != version:
        shutil.rmtree(folder, ignore_errors=True)
        try:
            _merge(adapter, folder)
        except Exception as error:  # PEFT and transformers raise anything
            line = (str(error).splitlines() or [""])[0]
            raise ValueError(f"argument --model {model}: its adapter cannot be merged: {line}") from None
        (folder / _MADE).write_text(version, "utf-8")
    print(f"{model}: a LoRA adapter, merged into {folder}", flush=True)
    return str(folder)


def _merge(adapter: Path, folder: Path) -> None:
    from peft import PeftConfig, PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = PeftConfig.from_pretrained(str(adapter)).base_model_name_or_path
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), str(adapter))
    model.merge_and_unload().save_pretrained(folder)
    has_tokenizer = (adapter / "tokenizer_config.json").exists()
    AutoTokenizer.from_pretrained(adapter if has_tokenizer else base).save_pretrained(folder)

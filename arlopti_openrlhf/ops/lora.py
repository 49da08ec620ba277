"""LoRA models: the merged weights that vLLM gets, one at a time, and the base model, which is the reference."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import deepspeed
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from arlopti_openrlhf.patching import Upstream, replaced_attribute


class MergedSync(Upstream):
    """`ActorPPOTrainer` that sends a LoRA model's weights to vLLM merged, under its base model's names."""

    def broadcast_to_vllm(self) -> None:
        with merged_parameters(self.actor.model.module, gathered=self.args.ds.zero_stage == 3):
            super().broadcast_to_vllm()


class BaseModel(Upstream):
    """`PolicyModelActor` that, without its LoRA adapter, computes the reference's log-probs too."""

    def forward_reference(self, *args, **kwargs) -> Tensor:
        """Return the (B, A) log-probs of the base model. The arguments are those of `forward`."""
        with without_adapters(self.actor.model.module):
            return super().forward(*args, **kwargs)


class MergedWeight:
    """Stands in for a parameter of the merged model, in upstream's sync loop.

    It has what the loop reads of a parameter, and merges when `data` is read. So a merged weight lives no longer than
    upstream holds it.

    Args:
        parameter: The base model's parameter.
        layer: The LoRA layer that adapts it, if one does.

    Attributes:
        requires_grad: Whether training changes the merged weight. Of a vision model upstream sends these alone,
            because vLLM has loaded the others itself. Of other models it sends all.
        dtype, shape, ds_shape: The parameter's; upstream reads `ds_shape` under ZeRO-3, where `shape` is the shard's.
        sources: The parameters that `data` is made of.
    """

    def __init__(self, parameter: nn.Parameter, layer: nn.Module | None) -> None:
        self.parameter, self.layer = parameter, layer
        self.requires_grad = parameter.requires_grad or layer is not None
        self.dtype, self.shape = parameter.dtype, parameter.shape
        self.ds_shape = getattr(parameter, "ds_shape", parameter.shape)
        adapters = [p for n, p in layer.named_parameters() if n.startswith("lora_")] if layer is not None else []
        self.sources = [parameter, *adapters]

    @property
    @torch.no_grad()
    def data(self) -> Tensor:
        """The weight that PEFT's `merge_and_unload` would leave; under ZeRO-3 its sources must be gathered."""
        if self.layer is None:
            return self.parameter.data
        weight = self.parameter.data.clone()
        for adapter in self.layer.active_adapters:
            weight += self.layer.get_delta_weight(adapter)
        return weight


@contextmanager
def merged_parameters(model: nn.Module, gathered: bool) -> Iterator[None]:
    """Let `model.named_parameters()` give the parameters of the merged model, for upstream's sync loop.

    Upstream would send PEFT's names, which vLLM does not know.

    Args:
        model: PEFT model with LoRA layers.
        gathered: Whether ZeRO-3 partitions the parameters. The loop gathers each before it sends it, on every rank
            (`deepspeed.zero.GatheredParameters`); the adapters are then gathered with the weight.

    Raises:
        ValueError: A LoRA layer's weight belongs to another layer too: embeddings and LM head that are tied.
    """
    weights = _merged_weights(model)
    gathered_parameters = deepspeed.zero.GatheredParameters

    def gather_sources(params: list[MergedWeight], enabled: bool) -> AbstractContextManager:
        return gathered_parameters([source for weight in params for source in weight.sources], enabled=enabled)

    with ExitStack() as replaced:
        replaced.enter_context(replaced_attribute(model, "named_parameters", lambda: iter(weights)))
        if gathered:
            replaced.enter_context(replaced_attribute(deepspeed.zero, "GatheredParameters", gather_sources))
        yield


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Let a PEFT model compute as its base model, to the last bit.

    PEFT's own `disable_adapter` also switches off the adapters' `requires_grad` for the time. DeepSpeed has hung hooks
    on those parameters, so here they stay as they are.
    """
    with ExitStack() as replaced:
        for layer in model.modules():
            if isinstance(layer, BaseTunerLayer):
                replaced.enter_context(replaced_attribute(layer, "_disable_adapters", True))
        yield


def _merged_weights(model: nn.Module) -> list[tuple[str, MergedWeight]]:
    """Return the names and parameters of the merged model, in the base model's order."""
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}
    weights: list[tuple[str, MergedWeight]] = []
    seen: dict[int, tuple[str, MergedWeight]] = {}  # by the parameter's id
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if ".lora_" in name:
            continue
        layer_name, _, suffix = name.partition(".base_layer.")
        weight = MergedWeight(parameter, layers.get(layer_name) if suffix == "weight" else None)
        name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        # Like `named_parameters`, name a parameter that two modules share once.
        other, of_other = seen.setdefault(id(parameter), (name, weight))
        if of_other is weight:
            weights.append((name, weight))
        elif weight.layer is not None or of_other.layer is not None:
            raise ValueError(
                f"{other} and {name} are one tied weight, of which LoRA adapts one use, and vLLM holds one weight: "
                "name neither in --ds.lora.target_modules"
            )
    return weights

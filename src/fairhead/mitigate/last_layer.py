"""The last layer of a classifier and what goes into it, whatever the family."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fairhead.errors import UnsupportedModel
from fairhead.train import Examples, predict


def find_head(model: nn.Module, examples: Examples) -> nn.Linear:
    """The linear layer whose output is the logits. One row of `examples` is run to find it.

    Raises:
        UnsupportedModel: the logits are not the output of a linear layer.

    Example:
        >>> import torch
        >>> from transformers import RobertaConfig, RobertaForSequenceClassification
        >>> from fairhead.train import Examples
        >>> small = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9)
        >>> model = RobertaForSequenceClassification(RobertaConfig(**small, num_labels=3))
        >>> examples = Examples({"input_ids": torch.tensor([[0, 5, 2]])}, torch.tensor([1]))
        >>> find_head(model, examples) is model.classifier.out_proj
        True
    """
    calls: list[tuple[nn.Linear, Tensor]] = []

    def note(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        assert isinstance(module, nn.Linear)
        calls.append((module, output))

    handles = [module.register_forward_hook(note) for module in model.modules() if isinstance(module, nn.Linear)]
    device = next(model.parameters()).device
    model.eval()
    try:
        with torch.no_grad():
            logits = model(**examples.take(torch.tensor([0])).to(device).inputs).logits
    finally:
        for handle in handles:
            handle.remove()
    for module, output in reversed(calls):
        if output.shape == logits.shape and torch.equal(output, logits):
            return module
    raise UnsupportedModel(
        f"the logits of {type(model).__name__} do not come out of a linear layer: nothing to retrain"
    )


def features_of(model: nn.Module, head: nn.Linear, examples: Examples, precision: Any = "no") -> Tensor:
    """What goes into the head for each row, [n, D] on the CPU."""
    with _inputs_of(head) as seen:
        predict(model, examples, precision=precision)
    return torch.cat(seen).float().cpu()


@contextmanager
def _inputs_of(head: nn.Linear) -> Iterator[list[Tensor]]:
    seen: list[Tensor] = []
    handle = head.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    try:
        yield seen
    finally:
        handle.remove()


def set_head(head: nn.Linear, weight: Tensor, bias: Tensor) -> None:
    """Replace the head's weight [C, D] and bias [C]; a head without bias gets one only if it is needed.

    Raises:
        UnsupportedModel: there is no bias and the new one is not zero.
    """
    with torch.no_grad():
        head.weight.copy_(weight)
        if head.bias is not None:
            head.bias.copy_(bias)
        elif bias.abs().max() > 0:
            raise UnsupportedModel("the model's last layer has no bias, and this method needs one to change")

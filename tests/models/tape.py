"""A recorder for the CPU that does what a CUDA graph does: the same kernels on the same memory, and no Python."""

from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """Notes every operation with its tensors; `replay` runs them again and writes where they wrote."""

    def __init__(self):
        super().__init__()
        self.operations = []
        self.recordings = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a value was asked for while recording")
        result = function(*args, **kwargs)
        self.operations.append((function, args, kwargs, result))
        return result

    def warm_up(self, function):
        return function()

    def waits(self, function):
        return function(), None

    def record(self, function):
        # A CUDA graph runs nothing while it records. Here everything runs, so what it changed is put back.
        self.recordings += 1
        watch, chance = _Watch(), torch.get_rng_state()
        # transformers looks at masks unless the stream is recording.
        with mock.patch("torch.cuda.is_current_stream_capturing", return_value=True), watch, self:
            result = function()
        watch.undo()
        torch.set_rng_state(chance)
        return result

    def replay(self):
        with torch.no_grad():
            for function, args, kwargs, before in self.operations:
                after = function(*args, **kwargs)
                for old, new in zip(tree_leaves(before), tree_leaves(after), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class _Watch(TorchDispatchMode):
    """Keeps a copy of every tensor that existed before and is written to."""

    def __init__(self):
        super().__init__()
        self.made, self.copies = set(), {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function._schema.is_mutable:
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    if storage.data_ptr() not in self.made | set(self.copies):
                        self.copies[storage.data_ptr()] = (storage, storage.clone())
        result = function(*args, **kwargs)
        inputs = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in inputs:
                self.made.add(tensor.untyped_storage().data_ptr())
        return result

    def undo(self):
        for storage, copy in self.copies.values():
            storage.copy_(copy)

"""The CUDA device as the whole-model campaign uses it: one stream, capture of an iteration, timing marks.

Hugging Face asks, in a few places, questions whose answer lies on the GPU (is the batch packed?), or
takes another path when it sees a capture. :func:`as_in_eager` answers as an eager run of unpadded
sequences would, so that the captured kernels are those of the eager model.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

from wattcast.errors import MissingTool

WARM_UP = 3


class Device:
    """PyTorch on one CUDA device. ``open`` starts it."""

    name = "cuda"

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.stream = torch.cuda.Stream()

    @classmethod
    def open(cls) -> Device:
        """The first CUDA device, or an error that says what is missing."""
        try:
            import torch
        except ImportError:
            raise MissingTool("measuring whole models needs PyTorch with CUDA, which is not installed.") from None
        if not torch.cuda.is_available():
            raise MissingTool("measuring whole models needs a CUDA GPU; PyTorch sees none.")
        torch.manual_seed(0)
        return cls(torch)

    def warm(self, run: Callable[[], Any]) -> float:
        """Run a few iterations on the stream; seconds of the last, with whatever the host costs."""
        begin = end = self.mark()
        with self.on_stream():
            self.stream.wait_stream(self.torch.cuda.default_stream())
            for _ in range(WARM_UP):
                begin = self.mark()
                run()
                end = self.mark()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def capture(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """One iteration as a CUDA graph; the call replays it."""
        graph = self.torch.cuda.CUDAGraph()
        with as_in_eager(self.torch), self.torch.cuda.graph(graph, stream=self.stream):
            held = run()
        kept = [held]  # outputs live in the graph's pool as long as it may be replayed

        def replay() -> None:
            graph.replay()

        def drop() -> None:
            kept.clear()
            graph.reset()

        replay.drop = drop  # type: ignore[attr-defined]
        return replay

    def issue(self, run: Callable[[], Any], times: int) -> None:
        """Queue iterations on the stream; an eager iteration is launched by the host as it goes."""
        with self.on_stream():
            for _ in range(times):
                run()

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Work inside goes to the stream that is timed."""
        with self.torch.cuda.stream(self.stream):
            yield

    def mark(self) -> Any:
        """A fresh timing event, recorded now on the stream."""
        event = self.torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        self.torch.cuda.synchronize()

    def free(self) -> None:
        """Give cached memory back; a broken context raises here."""
        gc.collect()
        self.torch.cuda.synchronize()
        self.torch.cuda.empty_cache()
        self.torch.cuda.reset_peak_memory_stats()

    @property
    def peak_byte(self) -> int:
        """Most memory held since the last :meth:`free`."""
        return int(self.torch.cuda.max_memory_reserved())


@contextlib.contextmanager
def as_in_eager(torch: Any) -> Iterator[None]:
    """Hugging Face's answers of an eager run on unpadded sequences, and scalars made on the device."""
    from transformers import masking_utils
    from transformers.utils import import_utils

    changed = [
        (import_utils, "is_cuda_stream_capturing", lambda: False),
        (masking_utils, "find_packed_sequence_indices", lambda *_, **__: None),
        (torch, "tensor", _scalar_on_device(torch, torch.tensor)),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changed if hasattr(owner, name)]
    for owner, name, value in changed:
        if hasattr(owner, name):
            setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _scalar_on_device(torch: Any, tensor: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.tensor`` that fills a scalar on its device instead of copying it there, which no capture allows."""

    def make(data: Any, *, device: Any = None, dtype: Any = None, **rest: Any) -> Any:
        if device is not None and isinstance(data, (bool, int, float)) and not rest:
            return torch.full((), data, device=device, dtype=dtype or tensor(data).dtype)
        return tensor(data, device=device, dtype=dtype, **rest)

    return make

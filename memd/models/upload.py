"""Tensors from files to a CUDA device, through a few pinned buffers.

A copy from memory that is not pinned reaches 5-6 GB/s of a link that carries 50. Here threads read
the mapped file into one pinned buffer while others are on their way; the host never holds more of
the model than these buffers.
"""

import os
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BUFFERS = 3
_BUFFER_BYTES = 32 * 2**20
_PART_BYTES = 4 * 2**20  # what one thread reads at a time
_MAX_THREADS = 8


class Uploader:
    """Uploads tensors one after another. A context manager: leaving it ends its threads.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._readers = ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0))))
        self._buffers: list[tuple[Tensor, torch.cuda.Event]] = []
        self._turn = 0

    def __enter__(self) -> "Uploader":
        return self

    def __exit__(self, *error: object) -> None:
        self._readers.shutdown()
        torch.cuda.current_stream(self._device).synchronize()
        self._buffers.clear()

    def upload(self, tensor: Tensor) -> Tensor:
        """A copy on the device, owning its memory. May still be under way on the current stream.

        Args:
            tensor: On the CPU, contiguous; may be a mapped file.
        """
        data = tensor.flatten().view(torch.uint8).numpy()
        return self.upload_bytes(data).view(tensor.dtype).view(tensor.shape)

    def upload_bytes(self, data: NDArray[np.uint8]) -> Tensor:
        """The same for bytes: uint8 of one dimension."""
        uploaded = torch.empty(len(data), dtype=torch.uint8, device=self._device)
        for start in range(0, len(data), _BUFFER_BYTES):
            part = data[start : start + _BUFFER_BYTES]
            buffer, sent = self._next_buffer()
            self._read(part, buffer[: len(part)].numpy())
            uploaded[start : start + len(part)].copy_(buffer[: len(part)], non_blocking=True)
            sent.record(torch.cuda.current_stream(self._device))
        return uploaded

    def _next_buffer(self) -> tuple[Tensor, torch.cuda.Event]:
        """A buffer whose last content has left it, and the event to record for the next."""
        if len(self._buffers) < _BUFFERS:
            memory = torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
            self._buffers.append((memory, torch.cuda.Event()))
            return self._buffers[-1]
        self._turn = (self._turn + 1) % _BUFFERS
        buffer, sent = self._buffers[self._turn]
        sent.synchronize()
        return buffer, sent

    def _read(self, source: NDArray[np.uint8], target: NDArray[np.uint8]) -> None:
        if len(source) <= _PART_BYTES:
            target[:] = source
            return
        reads = [
            self._readers.submit(
                np.copyto, target[at : at + _PART_BYTES], source[at : at + _PART_BYTES]
            )
            for at in range(0, len(source), _PART_BYTES)
        ]
        wait(reads)
        for read in reads:
            read.result()

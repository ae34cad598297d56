"""The arithmetic of memd over paged KV memory: attention, rotary positions, norms, sampling.

Depends on torch alone and knows nothing of memd. `reference` holds each function in plain torch,
for any device; it is what other implementations are tested against.
"""

from memd_kernels import reference

__all__ = ["reference"]

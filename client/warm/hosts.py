"""Which hosts a warm run stands for: those of its own release of torch, with each toolchain that serves them.

A graph is traced by a release of torch; which Python and which wheel of it a host has only chooses a builder.
"""

from __future__ import annotations

from collections.abc import Sequence

from fuse_cache.client.errors import OptionError
from fuse_cache.proto.compile_pb2 import ToolchainOffer
from fuse_cache.proto.toolchain import Toolchain


def toolchains_for(
    own: Toolchain, offers: Sequence[ToolchainOffer], device: str, *, any_wheel: bool
) -> list[ToolchainOffer]:
    """Return the toolchains on offer whose hosts ask for what `own` traces on `device`.

    For a GPU those without CUDA count only where hosts take their builds (`any_wheel`), or where there is no
    other.

    Raises:
        OptionError: none is of this release of torch; the message lists those there are.
    """
    found = [offer for offer in offers if own.same_release(Toolchain.from_message(offer.toolchain))]
    if not found:
        shown = "; ".join(f"{offer.name}: {Toolchain.from_message(offer.toolchain)}" for offer in offers)
        raise OptionError(
            f"the daemon builds with no torch of this release ({own}), but with {shown or 'none'}: "
            "run warm with the torch of the hosts"
        )
    with_cuda = [offer for offer in found if offer.toolchain.cuda]
    return with_cuda if device != "cpu" and with_cuda and not any_wheel else found

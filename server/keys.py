"""The key that this daemon signs with, and those that it trusts."""

from __future__ import annotations

from fuse_cache.proto.signing import KeyFileError, SigningKey, TrustSet, parse_public_key
from fuse_cache.proto.trust import TrustError, open_trust_folder
from fuse_cache.server.config import ServerConfig


def load_keys(config: ServerConfig) -> tuple[SigningKey, TrustSet]:
    """Return the key that we sign with and the keys whose artifacts we serve.

    Raises:
        OSError: a key is not usable; the message says which.
    """
    try:
        if config.signing_key is not None:
            signing_key = SigningKey.load(config.signing_key)
            keys = {signing_key.public_key}
        else:
            folder = open_trust_folder()
            signing_key = folder.signing_key()
            keys = {signing_key.public_key, *folder.trusted_keys()}
        keys.update(parse_public_key(path.read_text()) for path in config.trusted_keys)
    except (TrustError, KeyFileError) as error:
        raise OSError(str(error)) from error
    return signing_key, TrustSet(keys=frozenset(keys))

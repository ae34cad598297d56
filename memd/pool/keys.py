"""What names a page's content: a digest chained over the namespace and every token up to its end.

The same in every process and after every restart, so it names files on disk, too. Whoever finds
something by a key compares the tokens all the same.
"""

from hashlib import blake2b

KEY_BYTES = 32


def root_key(namespace: str) -> bytes:
    """The key that every page of a namespace follows from."""
    return blake2b(namespace.encode(), digest_size=KEY_BYTES, person=b"memd namespace").digest()


def page_key(parent: bytes, label: bytes) -> bytes:
    """The key of a page.

    Args:
        parent: Key of the page before it, or of the root.
        label: All tokens of the page, native int32.
    """
    return blake2b(parent + label, digest_size=KEY_BYTES, person=b"memd page").digest()

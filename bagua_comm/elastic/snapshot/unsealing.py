"""Start a program with environment variables that came sealed on the command line, which everybody can read.

It runs by itself, before the variables by which this package may be found are set. So it imports Python's own
modules alone. `sealing` starts it as

    python -c CODE COUNT SEALED... PROGRAM ARGUMENT...

where CODE is the text of this file and a call of `main`, and COUNT is how many arguments hold what is sealed. The
key is in an environment variable, that only this user and root can read.
"""

import base64
import hashlib
import json
import os
import sys
import zlib

KEY = "BAGUA_SEAL"
"""The environment variable that holds the key, in hexadecimal."""

CHECK_BYTES = 16
"""How many bytes tell whether key and text belong together."""


def crypt(data: bytes, key: bytes) -> bytes:
    """Encrypt or decrypt, by exclusive or with SHAKE-256 of the key, which must be used for one text only."""
    stream = hashlib.shake_256(key).digest(len(data))
    return (int.from_bytes(data, "little") ^ int.from_bytes(stream, "little")).to_bytes(len(data), "little")


def check(data: bytes, key: bytes) -> bytes:
    """What is sent with `data`, to see that it was sealed with this key."""
    return hashlib.blake2b(data, digest_size=CHECK_BYTES, key=key).digest()


def unseal(texts: list[str], key: bytes) -> dict[str, str]:
    """The variables that `sealing.seal` made these texts of.

    Raises:
        ValueError: The key is another one.
    """
    sealed = base64.b64decode("".join(texts))
    data = crypt(sealed[CHECK_BYTES:], key)
    if check(data, key) != sealed[:CHECK_BYTES]:
        raise ValueError("the variables were sealed with another key")
    variables: dict[str, str] = json.loads(zlib.decompress(data))
    return variables


def main(variables: dict[str, str]) -> None:
    """Become the program.

    Args:
        variables: Those of this process, the key among them.
    """
    count = int(sys.argv[1])
    texts, program = sys.argv[2 : 2 + count], sys.argv[2 + count :]
    key = bytes.fromhex(variables.pop(KEY))
    os.execve(program[0], program, variables | unseal(texts, key))

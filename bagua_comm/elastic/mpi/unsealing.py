"""Start a program with environment variables that are encrypted on the command line, which every user can read.

This file runs on its own, before the variables that Python may need to find this package are set. So it imports
only the standard library. `sealing` starts it as

    python -c CODE COUNT SEALED... PROGRAM ARGUMENT...

where CODE is the text of this file and a call of `main`, and COUNT is the number of sealed arguments. The key is
in an environment variable, which only this user and root can read.
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
"""The size of the checksum that detects a wrong key."""


def crypt(data: bytes, key: bytes) -> bytes:
    """Encrypt or decrypt, by XOR with SHAKE-256 of the key, which must be used for one text only."""
    stream = hashlib.shake_256(key).digest(len(data))
    return (int.from_bytes(data, "little") ^ int.from_bytes(stream, "little")).to_bytes(len(data), "little")


def check(data: bytes, key: bytes) -> bytes:
    """The keyed checksum that is sent with `data`."""
    return hashlib.blake2b(data, digest_size=CHECK_BYTES, key=key).digest()


def unseal(texts: list[str], key: bytes) -> dict[str, str]:
    """Decrypt the variables of `sealing.seal`.

    Raises:
        ValueError: The key is wrong.
    """
    sealed = base64.b64decode("".join(texts))
    data = crypt(sealed[CHECK_BYTES:], key)
    if check(data, key) != sealed[:CHECK_BYTES]:
        raise ValueError("the variables were sealed with another key")
    variables: dict[str, str] = json.loads(zlib.decompress(data))
    return variables


def main(variables: dict[str, str]) -> None:
    """Replace this process by the program.

    Args:
        variables: The environment of this process, with the key.
    """
    count = int(sys.argv[1])
    texts, program = sys.argv[2 : 2 + count], sys.argv[2 + count :]
    key = bytes.fromhex(variables.pop(KEY))
    os.execve(program[0], program, variables | unseal(texts, key))

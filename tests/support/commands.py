"""Commands of `python -m bagua_comm`, in this process."""

from bagua_comm.__main__ import main


def output_of(capsys, *arguments, code=0):
    """What a command prints before it ends with this exit code: where that is not 0, its errors."""
    assert main([*arguments]) == code
    printed = capsys.readouterr()
    return printed.err if code else printed.out

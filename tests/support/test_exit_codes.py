"""Children whose exit code nothing reads are found."""

import pytest

from support.exit_codes import forks, unread


@pytest.mark.parametrize(
    "code",
    [
        "subprocess.run(['a'])",
        "text = subprocess.run(['a'], capture_output=True).stdout",
        "with subprocess.Popen(['a']) as process:\n    process.wait()",
        "def test():\n    process = subprocess.Popen(['a'])\n    process.communicate()",
        "os.waitpid(child, 0)",
        "import multiprocessing\nprocess = context.Process(target=f)\nprocess.join()",
        "PROGRAM = '''\n  child = os.FORK()\n  os.waitpid(child, 0)\n'''",
    ],
)
def test_a_child_whose_exit_code_nobody_reads_is_found(code):
    assert len(unread(code.replace("FORK", "fork"))) == 1


@pytest.mark.parametrize(
    "code",
    [
        "subprocess.run(['a'], check=True)",
        "done = subprocess.run(['a'])\nassert done.returncode == 3",
        "check(done := subprocess.run(['a']))",
        "assert subprocess.Popen(['a']).wait(3) == 0",
        "def start():\n    return subprocess.Popen(['a'])",
        "process = subprocess.Popen(['a'])\ncheck(process)",
        "assert os.waitpid(child, 0)[1] == 0",
        "import multiprocessing\nprocess = context.Process(target=f)\nassert process.exitcode == 0",
        "process = Process(1)",
    ],
)
def test_a_child_whose_exit_code_is_read_is_not(code):
    assert unread(code) == []


def test_forks_are_found():
    assert forks("x = 1\nif os.fork() == 0: pass\n'os.fork()'") == [2]

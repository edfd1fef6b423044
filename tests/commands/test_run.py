"""`run`: what is started, with which arguments and variables, and why."""

import ast
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import output_of
from support.launch import run_python, with_tests
from support.waiting import until

from bagua_comm import __main__ as cli
from bagua_comm.commands import run
from bagua_comm.launch import cli as base
from bagua_comm.launch.cli import CommandError
from bagua_comm.launch.hosts import ALLOCATIONS, NODE_FILES, allocated_hosts
from bagua_comm.launch.mpirun import PER_RANK, Mpirun, recognise
from bagua_comm.launch.plan import make_plan
from bagua_comm.system.processes import state_of

OPEN_MPI = Mpirun("mpirun", "Open MPI", "5.0.11")
MPICH = Mpirun("/opt/mpich/bin/mpirun", "MPICH", "5.0.2")
INTEL = Mpirun("/opt/intel/bin/mpirun", "Intel MPI", "2021.18.1")
UNKNOWN = Mpirun("mpirun", "")


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """A host of two cores, without settings of networks or threads."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(base, "CPUS", Path("nothing/is/known"))
    unsaid = ("OMPI_MCA_btl", "OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT", "OMPI_MCA_btl_tcp_eager_limit")
    ranks = ("SLURM_NTASKS", "SLURM_TASKS_PER_NODE", "LSB_DJOB_NUMPROC", "NSLOTS")
    for name in (*unsaid, *ranks, *NODE_FILES, *ALLOCATIONS):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def plan(*arguments, mpirun=OPEN_MPI):
    return make_plan(cli.make_parser().parse_args(["run", *arguments, __file__]), mpirun)


def has(made, *words):
    """Whether a plan's command has these words, one after another."""
    return f" {shlex.join(words)} " in f" {shlex.join(made.command)} "


def test_run_passes_arguments_and_exit_codes_on(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:]); sys.exit(3)")
    result = run_python(1, script, "-x", "--epochs", "2")
    assert result.returncode == 3
    assert "['-x', '--epochs', '2']" in result.stdout


def test_run_passes_signals_on(tmp_path):
    script = tmp_path / "script.py"
    pids = tmp_path / "pids"
    script.write_text(f"import os, time\nopen({str(pids)!r}, 'a').write(f'{{os.getpid()}} ')\ntime.sleep(60)")
    command = [sys.executable, "-m", "bagua_comm", "run", "-n", "2", str(script)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: pids.exists() and len(pids.read_text().split()) == 2, limit_s=90)
    ranks = [int(pid) for pid in pids.read_text().split()]

    process.send_signal(signal.SIGTERM)

    assert process.wait(timeout=300) != 0
    assert len(ranks) == 2
    until(lambda: "running" not in map(state_of, ranks), limit_s=90)


STARTS_PYTHON = "there is no file {}; leave it out: run itself starts Python"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no_such_file.py"], "there is no file no_such_file.py"),
        (["bagua", "doctor"], "run -n 2 -m bagua_comm doctor"),
        *(
            ([command, __file__], STARTS_PYTHON.format(command))
            for command in ("python", "python3.11", "/usr/bin/no-such-folder/python3")
        ),
    ],
)
def test_run_needs_a_script_that_exists(words, message, capsys):
    assert message in output_of(capsys, "run", "-n", "2", *words, code=2)


@pytest.mark.parametrize(
    "variables",
    [
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        {"PMI_RANK": "1", "PMI_SIZE": "2"},
        {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
    ],
    ids=repr,
)
def test_run_refuses_to_start_a_job_in_each_rank_of_another(quiet, capsys, variables):
    for name, value in variables.items():
        quiet.setenv(name, value)
    quiet.setattr(run, "find_mpirun", lambda: None)
    assert cli.main(["run", "-n", "2", __file__]) == 2
    assert "as rank 1 already, and run would start a whole job in each rank" in capsys.readouterr().err
    quiet.setenv(next(name for name in variables if name.endswith(("SIZE", "TASKS"))), "1")
    quiet.setenv(next(name for name in variables if name.endswith(("RANK", "PROCID"))), "0")
    assert cli.main(["run", "-n", "2", __file__]) == 127  # a job of one process may start another


def test_run_without_mpirun_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(run, "find_mpirun", lambda: None)
    assert "bagua-comm[mpi]" in output_of(capsys, "run", __file__, code=127)


@pytest.mark.parametrize(
    ("flag", "number"),
    [
        *((flag, "-1") for flag in ("--spares", "--restarts", "--min-ranks")),
        *(("-n", n) for n in ("0", "-1", "two")),
    ],
)
def test_run_needs_numbers_of_ranks_spares_and_restarts(flag, number, capsys):
    with pytest.raises(SystemExit):
        cli.main(["run", flag, number, __file__])
    error = capsys.readouterr().err
    assert f"argument {flag}" in error
    assert f": {number!r} is not a" in error


def test_more_ranks_than_cores_are_oversubscribed_and_yield():
    made = plan("-n", "4")
    assert has(made, "--oversubscribe", "--mca", "mpi_yield_when_idle", "1")
    assert made.variables["OMP_NUM_THREADS"] == "1"

    made = plan("-n", "1")
    assert not has(made, "--oversubscribe")
    assert made.variables["OMP_NUM_THREADS"] == "2"


def test_by_default_each_core_that_may_be_used_gets_a_rank(quiet):
    quiet.setattr(os, "cpu_count", lambda: 64)
    assert plan().ranks == 2


def test_by_default_each_task_of_slurms_allocation_gets_a_rank(quiet):
    quiet.setenv("SLURM_JOB_ID", "7")
    quiet.setenv("SLURM_NTASKS", "8")
    assert plan().ranks == 8
    assert plan("-n", "3").ranks == 3
    assert plan("--host", "node1:4").ranks == 4


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "4(x2),2,1(x2)"},  # salloc -N 5, without a number of tasks
        {"PBS_NODEFILE": "nodes"},
        {"LSB_JOBID": "7", "LSB_DJOB_NUMPROC": "12"},
        {"PE_HOSTFILE": "nodes", "NSLOTS": "12"},
    ],
)
def test_an_allocation_without_a_number_of_tasks_is_not_one_of_this_hosts_cores(quiet, tmp_path, variables):
    quiet.chdir(tmp_path)
    Path("nodes").write_text("a\n" * 8 + "b\n" * 4 + "\n")
    for name, value in variables.items():
        quiet.setenv(name, value)
    assert plan().ranks == 12
    assert plan("-n", "3").ranks == 3


def test_a_number_of_ranks_that_only_mpirun_could_know_is_asked_for(quiet, tmp_path):
    with pytest.raises(cli.CommandError, match="Give -n: --hostfile may choose other hosts"):
        plan("--mpirun=--hostfile=hosts")
    assert plan("-n", "3", "--mpirun=--hostfile=hosts").ranks == 3
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "prte-default-hostfile").write_text("a slots=4\n")
    with pytest.raises(cli.CommandError, match="Give -n: by default, this mpirun starts"):
        plan(mpirun=Mpirun(str(tmp_path / "bin" / "mpirun"), "Open MPI", "5.0.11"))
    quiet.setenv("FLUX_JOB_ID", "7")
    with pytest.raises(cli.CommandError, match="Give -n: FLUX_JOB_ID may choose other hosts"):
        plan()


@pytest.mark.parametrize(
    ("nodes", "tasks", "hosts"),
    [
        ("n1", "3", "n1:3"),
        ("n[1-2]", "2(x2)", "n1:2 n2:2"),
        ("gpu[07,09-11],n1", "4(x4),1", "gpu07:4 gpu09:4 gpu10:4 gpu11:4 n1:1"),
        (
            "rack[2-3]-node[08-09].example,login",
            "",
            "rack2-node08.example rack2-node09.example rack3-node08.example rack3-node09.example login",
        ),
        ("login,n[1-2]", "1,2", "login n1 n2"),  # not one number for each
        ("", "", ""),
    ],
)
def test_the_nodes_of_an_allocation(nodes, tasks, hosts):
    for name in ("SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        found = allocated_hosts({name: nodes, "SLURM_TASKS_PER_NODE": tasks})
        assert " ".join(map(str, found)) == hosts


def test_a_supervised_job_of_slurm_knows_its_nodes(quiet):
    """Else the deaths on other nodes are not seen, and a job that lost its ranks is said to have succeeded."""
    quiet.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(cli.CommandError, match="watch the hosts of ranks: name them by --host or --hostfile"):
        plan("-n", "2", "--restarts", "1")
    quiet.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    quiet.setenv("SLURM_TASKS_PER_NODE", "2(x2)")
    assert has(plan("--restarts", "1"), "--host", "n1:2,n2:2")
    assert plan("--spares", "1").ranks == 4
    assert has(plan("--restarts", "1", "--host", "n1:1"), "--host", "n1:1")
    assert not has(plan(), "--host")


@pytest.mark.parametrize(
    ("scheduler", "lines"),
    [
        ({"PBS_JOBID": "7", "PBS_NODEFILE": "nodes"}, "n1\nn1\n"),
        ({"PE_HOSTFILE": "nodes"}, "n1 2 all.q@n1 UNDEFINED\n"),
        ({"LSB_JOBID": "7", "LSB_DJOB_HOSTFILE": "nodes"}, "n1\nn1\n"),
    ],
    ids=["PBS", "Grid Engine", "LSF"],
)
def test_a_supervised_job_on_one_node_of_a_scheduler_needs_no_names(quiet, tmp_path, scheduler, lines):
    nodes = tmp_path / "nodes"
    for name, value in scheduler.items():
        quiet.setenv(name, str(nodes) if value == "nodes" else value)
    refusal = "watch the hosts of ranks: name them by --host or --hostfile"
    with pytest.raises(cli.CommandError, match=refusal):  # the file cannot be read
        plan("-n", "2", "--restarts", "1")
    nodes.write_text(lines)
    assert plan("-n", "2", "--restarts", "1").ranks == 2
    with pytest.raises(cli.CommandError, match=refusal):
        plan("-n", "2", "--restarts", "1", "--mpirun=--hostfile", "--mpirun=others")
    nodes.write_text(f"{lines}n2\n")
    with pytest.raises(cli.CommandError, match=refusal):
        plan("-n", "2", "--restarts", "1")
    nodes.write_text(lines)
    quiet.setenv("PRTE_MCA_prte_default_hostfile", "others")
    with pytest.raises(cli.CommandError, match=refusal):
        plan("-n", "2", "--restarts", "1")


def test_mpirun_does_not_start_all_ranks_here_in_a_heterogeneous_job(quiet):
    quiet.setenv("SLURM_JOB_ID", "7")
    quiet.setenv("SLURM_HET_SIZE", "2")
    quiet.setenv("SLURM_NTASKS", "2")
    advice = "start them by srun --mpi=pmix --het-group=0,1 python "
    with pytest.raises(cli.CommandError, match=advice):
        plan()
    with pytest.raises(cli.CommandError, match=f"{advice}-m "):
        plan("-m")
    quiet.setenv("SLURM_JOB_NODELIST", "n1")  # those of the first component only
    quiet.setenv("SLURM_TASKS_PER_NODE", "2")
    with pytest.raises(cli.CommandError, match=advice):
        plan("--restarts", "1")
    assert has(plan("--host", "n1:1,n2:1"), "--host", "n1:1,n2:1")
    assert has(plan("-n", "2", "--mpirun=--host", "--mpirun=n1:1,n2:1"), "--host", "n1:1,n2:1")


def test_ranks_on_hardware_threads_are_more_than_open_mpi_starts_by_itself(quiet, tmp_path):
    quiet.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    for core in range(4):
        topology = tmp_path / f"cpu{core}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{core % 2},{core % 2 + 2}\n")
    quiet.setattr(base, "CPUS", tmp_path)
    made = plan()
    assert made.ranks == 4
    assert has(made, "--oversubscribe")
    assert "mpi_yield_when_idle" not in made.command
    assert "Open MPI sees 2 cores here, with 4 hardware threads" in "\n".join(made.lines())
    assert not has(plan("-n", "2"), "--oversubscribe")
    assert has(plan("-n", "5"), "--oversubscribe", "--mca", "mpi_yield_when_idle", "1")
    assert not has(plan("--host", "a:4"), "--oversubscribe")


@pytest.mark.parametrize("mpirun", [MPICH, INTEL, UNKNOWN])
def test_other_mpis_get_no_flags_of_open_mpi(mpirun):
    assert plan("-n", "64", mpirun=mpirun).command == [mpirun.path, "-n", "64", sys.executable, __file__]


def test_ranks_on_one_host_use_shared_memory_alone():
    for flags in ([], ["--ulfm"], ["--spares", "1"], ["--restarts", "1"]):
        assert has(plan("-n", "2", *flags), "--mca", "btl", "self,sm")
    given = ("--report-bindings", "--mca", "mpi_show_handle_leaks", "1")
    assert has(plan("-n", "2", *(f"--mpirun={word}" for word in given)), "--mca", "btl", "self,sm")


def test_ranks_use_the_network_where_they_may_need_it(quiet, tmp_path):
    def network(*arguments, mpirun=OPEN_MPI):
        return "self,sm" not in plan("-n", "2", *arguments, mpirun=mpirun).command

    assert network("--host", "a,b")
    assert network("--mpirun=--hostfile", "--mpirun=hosts")
    assert network("--mpirun=--hostfile=hosts")
    assert network("-n", str(10**6))  # more than there is room for in /dev/shm
    quiet.setenv("SLURM_JOB_ID", "7")
    assert network()
    quiet.delenv("SLURM_JOB_ID")

    hosts = tmp_path / "etc" / "prte-default-hostfile"
    hosts.parent.mkdir()
    here = Mpirun(str(tmp_path / "bin" / "mpirun"), "Open MPI", "5.0.11")
    hosts.write_text("# nothing but a comment\n\n")
    assert not network(mpirun=here)
    hosts.write_text("# two hosts\na slots=4\nb slots=4\n")
    assert network(mpirun=here)


def test_in_an_allocation_nothing_is_said_about_this_hosts_cores(quiet):
    quiet.setenv("SLURM_JOB_ID", "7")
    made = plan("-n", "64")
    assert "--oversubscribe" not in made.command
    assert "OMP_NUM_THREADS" not in made.variables


def test_the_users_choice_of_network_settings_is_kept(quiet):
    assert "self,sm" not in plan("--mpirun=--mca", "--mpirun=btl", "--mpirun=tcp,self").command
    quiet.setenv("OMPI_MCA_btl", "tcp,self")
    assert "self,sm" not in plan().command


@pytest.mark.slow
def test_ranks_on_one_host_listen_on_no_port_and_mpirun_where_the_security_page_says(tmp_path):
    script = """
        import bagua_comm, os
        from support.listening import listening_addresses
        with bagua_comm.connect(timeout_s=60) as comm:
            comm.barrier()
            print("listens at", listening_addresses(), "mpirun at", listening_addresses(os.getppid()), flush=True)
            comm.barrier()
    """
    result = run_python(2, script=(tmp_path / "script.py", script), env=with_tests())
    assert result.returncode == 0, result.stderr
    found = re.findall(r"listens at \[\] mpirun at (.*)", result.stdout)
    assert len(found) == 2
    # If Open MPI no longer listens on all interfaces, SECURITY.md is to be changed.
    assert {"0.0.0.0"} <= set(ast.literal_eval(found[0])) <= {"0.0.0.0", "127.0.0.1", "::"}


def test_ranks_on_one_host_get_a_rendezvous_address(quiet):
    variables = plan("-n", "2").variables
    assert variables["MASTER_ADDR"] == "127.0.0.1"
    with socket.socket() as free:
        free.bind(("127.0.0.1", int(variables["MASTER_PORT"])))
    assert "MASTER_PORT" not in plan("-n", "2", "--mpirun=--hostfile=hosts").variables
    quiet.setenv("MASTER_PORT", "7")
    assert "MASTER_ADDR" not in plan("-n", "2").variables


def test_the_rendezvous_address_of_several_hosts_is_that_of_the_first(quiet):
    made = plan("--host", "node1:2,node2:2")
    assert made.variables["MASTER_ADDR"] == "node1"
    assert made.variables["MASTER_PORT"] == "29500"
    assert "whether the port is free on node1 is not known here" in "\n".join(made.lines())
    assert has(made, "-x", "MASTER_ADDR", "-x", "MASTER_PORT")
    quiet.setenv("MASTER_PORT", "8")  # variables that are set stay, and are sent to the other hosts, too
    assert has(plan("--host", "node1:2,node2:2"), "-x", "MASTER_PORT", "sh")
    quiet.delenv("MASTER_PORT")

    made = plan("--host", "localhost:2,node2:2")  # node2 would look for itself under the name "localhost"
    assert made.variables["MASTER_ADDR"] == socket.gethostname()
    made = plan("--host", "127.0.0.1:2")
    assert made.variables["MASTER_ADDR"] == "127.0.0.1"
    assert made.variables["MASTER_PORT"] != "29500"
    assert "the port is free now" in "\n".join(made.lines())


def test_a_rank_of_open_mpi_has_its_numbers_in_torchruns_names_unless_they_are_set():
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    given = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    mpi = {f"OMPI_COMM_WORLD_{name}": value for name, value in given.items()}
    show = [*PER_RANK, sys.executable, "-c", f"import os; print(*map(os.environ.get, {names}))"]
    environment = {key: value for key, value in os.environ.items() if key not in names}

    def shown(**more):
        return subprocess.run(
            show, env={**environment, **mpi, **more}, capture_output=True, text=True, check=True
        ).stdout

    assert shown() == "3 4 1 2\n"
    assert shown(LOCAL_RANK="0") == "3 4 0 2\n"


def test_a_rank_on_another_host_divides_the_cores_there_unless_threads_are_chosen(quiet):
    show = [*PER_RANK, sys.executable, "-c", "import os; print(os.environ['OMP_NUM_THREADS'])"]
    nproc = subprocess.run(["nproc"], capture_output=True, text=True, check=True, env=os.environ).stdout

    def threads(ranks, **more):
        mine = {**os.environ, "OMPI_COMM_WORLD_LOCAL_SIZE": ranks, **more}
        return int(subprocess.run(show, env=mine, capture_output=True, text=True, check=True).stdout)

    assert threads("1") == int(nproc)
    assert threads("2") == max(1, int(nproc) // 2)
    assert threads("100000") == 1
    assert threads("1", OMP_NUM_THREADS="7") == 7

    two = ("--host", "a:1,b:1")
    assert "OMP_NUM_THREADS" not in plan(*two).variables
    assert "each rank divides the cores of its host by the ranks there" in "\n".join(plan(*two).lines())
    assert "divides the cores" not in "\n".join(plan("-n", "2").lines())
    quiet.setenv("OMP_NUM_THREADS", "3")
    assert has(plan(*two), "-x", "OMP_NUM_THREADS")
    assert has(plan(*two, mpirun=MPICH), "-genvall")
    assert "divides the cores" not in "\n".join(plan(*two).lines())


def test_ulfm_and_links_are_flags_of_open_mpi_and_of_no_other():
    assert has(plan("-n", "2", "--ulfm"), "--with-ft", "ulfm")
    for asked, made in (("1", "1"), ("4", "5"), ("5", "5")):
        assert has(plan("-n", "2", "--links", asked), "--mca", "btl_tcp_links", made)
    assert "ulfm" not in plan("-n", "2").command
    for flag in (["--ulfm"], ["--links", "4"]):
        with pytest.raises(CommandError, match=f"{flag[0]} needs Open MPI, and .* belongs to MPICH 5.0.2"):
            plan(*flag, mpirun=MPICH)


def test_spares_and_restarts_start_more_ranks_which_may_die():
    made = plan("-n", "3", "--spares", "2", "--min-ranks", "2")
    assert has(made, "-n", "5")
    assert has(made, "--with-ft", "ulfm")
    assert {"BAGUA_SPARES": "2", "BAGUA_MIN_RANKS": "2"}.items() <= made.variables.items()
    assert plan("--host", "a:4,b:4", "--spares", "1").ranks == 8  # without -n, the number of slots
    assert has(plan("-n", "2", "--restarts", "0"), "--with-ft", "ulfm")
    with pytest.raises(CommandError, match=r"--restarts needs Open MPI, and .* belongs to MPICH"):
        plan("--restarts", "1", mpirun=MPICH)


@pytest.mark.parametrize(("before", "notice"), [([], True), (["-n", "2"], False)])
def test_a_number_of_ranks_after_the_script_is_noticed(capsys, before, notice):
    assert cli.main(["run", *before, "--dry-run", __file__, "-n", "4"]) == 0
    assert ("is an argument of the script; to set the number of ranks" in capsys.readouterr().err) is notice


def test_a_dry_run_of_a_supervised_job_prints_how_its_ranks_are_started(capsys):
    out = output_of(capsys, "run", "-n", "2", "--spares", "1", "--restarts", "1", "--dry-run", __file__)
    assert "BAGUA_SPARES=1" in out
    assert "BAGUA_JOB" not in out


def test_hosts_are_named_in_the_words_of_each_mpi(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# two hosts\nnode1 slots=2\nnode2:2  # as MPICH writes it\n")
    listed, filed = ("--host", "node1:2,node2:2"), ("--hostfile", str(file))
    assert has(plan(*listed), "-n", "4", "--host", "node1:2,node2:2")
    assert has(plan(*filed), "-n", "4", "--hostfile", str(file))
    for given in (listed, filed):
        assert has(plan(*given, mpirun=MPICH), "-n", "4", "-hosts", "node1:2,node2:2")
        assert has(plan(*given, mpirun=INTEL), "-n", "4", "-hosts", "node1,node2", "-ppn", "2")
        with pytest.raises(CommandError, match=f"{given[0]} needs Open MPI, MPICH or Intel MPI"):
            plan(*given, mpirun=UNKNOWN)
    assert has(plan("-n", "2", "--host", "a,b", mpirun=INTEL), "-hosts", "a,b", sys.executable)
    with pytest.raises(CommandError, match="give every host the same number"):
        plan("--host", "a:1,b:2", mpirun=INTEL)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "a,b"], "how many ranks? Give -n"),
        (["--host", "a:0"], "'a:0' is not a host; expected e.g. node1, or node1:4"),
        (["--host", ""], "'' is not a host"),
        (["--host", "a,-F"], "'-F' is not a host"),
        (["--hostfile", "no/such/file"], "--hostfile no/such/file: "),
        (["--hostfile", os.devnull], "names no host"),
        (["--env", "A B=1"], "'A B' is not the name of a variable"),
        (["--env", "NOT_SET_HERE"], "NOT_SET_HERE is not set here; set it, or give --env NOT_SET_HERE=VALUE"),
        (["-n", "2", "--restarts", "1", "--min-ranks", "3"], "--min-ranks 3: 2 ranks train; expected at most"),
        (["--host", "a:1", "--spares", "1"], "--spares 1: there is room for 1 rank, so none would train"),
        (
            ["-n", "2", "--host", "a:1,b:1", "--spares", "1"],
            "3 ranks are started with them, and the hosts have 2",
        ),
        (["--min-ranks", "1"], "--min-ranks is for --spares and --restarts"),
        (["--record", "file"], "--record is for --spares and --restarts"),
        (["--restarts", "1", "--record", "no/such/folder/file"], "there is no folder no/such/folder"),
        (["--interface", "eth77"], "there is no eth77 on this host; there are "),
    ],
)
def test_arguments_that_cannot_be_followed_are_refused_with_what_to_do(arguments, message, capsys):
    error = output_of(capsys, "run", *arguments, "--dry-run", __file__, code=2)
    assert message in error
    assert error.startswith("python -m bagua_comm run: ")


@pytest.mark.parametrize(
    ("mpirun", "words"), [(OPEN_MPI, ["-x", "HERE", "-x", "GIVEN"]), (MPICH, ["-genvall"]), (INTEL, ["-genvall"])]
)
def test_variables_reach_ranks_on_other_hosts_in_each_mpi_and_are_on_no_command_line(quiet, mpirun, words):
    quiet.setenv("HERE", "its value")
    made = plan("-n", "2", "--host", "a:1,b:1", "--env", "HERE", "--env", "GIVEN=b c;d,e", mpirun=mpirun)
    assert has(made, *words)
    assert {"HERE": "its value", "GIVEN": "b c;d,e"}.items() <= made.variables.items()
    assert not any("its value" in word or "c;d" in word for word in made.command)


def test_a_variable_that_the_user_gives_is_not_chosen_again():
    made = plan("-n", "4", "--env", "OMP_NUM_THREADS=7", "--env", "MASTER_PORT=8")
    assert made.variables["OMP_NUM_THREADS"] == "7"
    assert "MASTER_ADDR" not in made.variables


def test_one_interface_serves_mpi_and_gloo_and_nccl():
    for mpirun, words in [
        (OPEN_MPI, ("--mca", "btl_tcp_if_include", "lo", "--prtemca", "prte_if_include", "lo")),
        (Mpirun("mpirun", "Open MPI", "4.1.4"), ("--mca", "oob_tcp_if_include", "lo")),
        (MPICH, ("-iface", "lo")),
    ]:
        made = plan("-n", "2", "--interface", "lo", mpirun=mpirun)
        assert has(made, *words)
        assert made.variables["GLOO_SOCKET_IFNAME"] == made.variables["NCCL_SOCKET_IFNAME"] == "lo"
    made = plan("-n", "2", "--host", "a,b", "--interface", "eth77", mpirun=MPICH)  # it may be there and not here
    assert made.variables["FI_TCP_IFACE"] == "eth77"
    assert has(made, "-genvall")


def test_an_mpirun_whose_programs_are_not_on_the_path_finds_them(quiet):
    quiet.setenv("PATH", "/usr/bin")
    assert plan(mpirun=INTEL).variables["PATH"] == "/opt/intel/bin:/usr/bin"
    quiet.setenv("PATH", "/opt/intel/bin:/usr/bin")
    assert "PATH" not in plan(mpirun=INTEL).variables


def test_the_library_of_an_mpirun_is_recognised():
    assert str(recognise("mpirun", "mpirun (Open MPI) 5.0.11\n")) == "Open MPI 5.0.11"
    assert str(recognise("mpirun", "HYDRA build details:\n    Version:   5.0.2\n")) == "MPICH 5.0.2"
    intel = "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626 (id: b44796a)\n"
    assert str(recognise("mpirun", intel)) == "Intel MPI 2021.18.1"
    assert str(recognise("mpirun", "something else 1.2")) == "an unknown MPI"


def test_the_plan_gives_a_reason_for_each_of_its_words(capsys):
    arguments = ["-n", "3", "--links", "2", "--env", "A=b c", "--ulfm", "--mpirun=--report-bindings"]
    made = plan(*arguments)
    assert all(setting.why for setting in made.settings)
    lines = "\n".join(made.lines())
    assert all(word in lines for word in made.command[3:] if word not in PER_RANK)
    assert all(f"{name}=" in lines for name in made.variables)
    assert "3 ranks share 2 cores" in lines

    assert cli.main(["run", "-v", "--dry-run", *arguments, __file__]) == 0
    out, err = capsys.readouterr()
    assert "3 ranks share 2 cores" in err
    assert len(out.splitlines()) == 1


@pytest.mark.parametrize("text", ["TOKEN", "TOKEN=a secret"])
def test_the_values_of_env_are_hidden_in_output_and_reach_mpirun(text, capsys, monkeypatch):
    monkeypatch.setenv("TOKEN", "a secret")
    assert cli.main(["run", "-n", "2", "-v", "--dry-run", "--env", text, __file__]) == 0
    out, err = capsys.readouterr()
    assert "secret" not in out + err
    assert " TOKEN=... " in out
    assert "  TOKEN=...\n" in err
    assert plan("-n", "2", "--env", text).variables["TOKEN"] == "a secret"


def test_the_printed_command_works_in_a_shell(tmp_path):
    """The mpirun is a program that shows what it was called with."""
    mpirun = tmp_path / "an mpirun"
    mpirun.write_text('#!/bin/sh\nprintf "%s\\n" "$OMP_NUM_THREADS" "$A" "$@"\n')
    mpirun.chmod(0o755)
    made = plan("-n", "1", "--env", 'A=it\'s $HOME; "b" \\', mpirun=Mpirun(str(mpirun), "Open MPI", "5.0.11"))
    result = subprocess.run(["sh", "-c", made.shell()], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["2", "...", *made.command[1:]]


@pytest.mark.slow
def test_the_printed_command_starts_the_ranks(tmp_path):
    script = tmp_path / "a script.py"
    script.write_text("import os, sys; print(os.environ['RANK'], os.environ['A'], sys.argv[1:])")
    arguments = ["-n", "2", "--env", "A=b c", "--dry-run", str(script), "x y", "$z"]
    run_line = [sys.executable, "-m", "bagua_comm", "run", *arguments]
    line = subprocess.run(run_line, capture_output=True, text=True, check=True, timeout=300).stdout
    result = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["0 ... ['x y', '$z']", "1 ... ['x y', '$z']"]

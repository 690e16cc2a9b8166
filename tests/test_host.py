import os
import subprocess

import pytest

from harness import host

GIB = 1 << 30


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """Writes files of /proc and /sys/fs/cgroup; what is not written is not there."""
    monkeypatch.setattr(host, "PROC", tmp_path / "proc")
    monkeypatch.setattr(host, "CGROUPS", tmp_path / "cgroup")

    def write(**files):
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("memory_", "memory.")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(text))

    def meminfo(available):
        (tmp_path / "proc").mkdir(parents=True, exist_ok=True)
        (tmp_path / "proc" / "meminfo").write_text(
            f"MemTotal:       99999999 kB\nMemFree:  1 kB\nMemAvailable:   {available >> 10} kB\nHugePages_Total: 0\n"
        )

    write.meminfo = meminfo
    return write


def group(kernel, folder, *, limit, used, inactive=0, version=2):
    names = {
        2: ("memory.max", "memory.current", "inactive_file"),
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    }[version]
    kernel(
        **{
            f"cgroup{folder}__{names[0]}": limit,
            f"cgroup{folder}__{names[1]}": used,
            f"cgroup{folder}__memory.stat": f"anon 1\n{names[2]} {inactive}\n",
        }
    )


def test_this_host_says_a_plausible_number():
    assert (free := host.free_bytes()) is None or 1 << 20 < free < 1 << 50


def test_it_is_what_the_kernel_calls_available(kernel):
    kernel.meminfo(8 * GIB)
    assert host.free_bytes() == 8 * GIB


@pytest.mark.parametrize(
    "text", [None, "", "MemFree: 1 kB\n", "MemAvailable:\n", "MemAvailable: much kB\n", "nonsense"]
)
def test_a_kernel_that_does_not_say_is_not_guessed_for(kernel, text):
    if text is not None:
        kernel(proc__meminfo=text)
    assert host.free_bytes() is None


def test_a_container_s_limit_counts(kernel):
    kernel.meminfo(500 * GIB)
    kernel(proc__self__cgroup="0::/\n")
    group(kernel, "", limit=8 * GIB, used=3 * GIB, inactive=GIB)
    assert host.free_bytes() == 6 * GIB


def test_the_tightest_limit_around_the_process_counts(kernel):
    kernel.meminfo(500 * GIB)
    kernel(proc__self__cgroup="0::/pod/container\n")
    group(kernel, "__pod__container", limit="max", used=GIB)
    group(kernel, "__pod", limit=4 * GIB, used=GIB)
    assert host.free_bytes() == 3 * GIB


def test_a_host_with_less_than_the_limit_counts(kernel):
    kernel.meminfo(2 * GIB)
    kernel(proc__self__cgroup="0::/\n")
    group(kernel, "", limit=8 * GIB, used=0)
    assert host.free_bytes() == 2 * GIB


def test_no_limit_is_no_limit(kernel):
    kernel.meminfo(5 * GIB)
    kernel(proc__self__cgroup="0::/user.slice\n")
    group(kernel, "__user.slice", limit="max", used=GIB)
    assert host.free_bytes() == 5 * GIB


def test_version_1_has_a_tree_for_memory(kernel):
    kernel.meminfo(500 * GIB)
    kernel(proc__self__cgroup="9:cpu,cpuacct:/a\n4:memory:/a\n0::/\n")
    group(kernel, "__memory__a", limit=4 * GIB, used=GIB, inactive=GIB // 2, version=1)
    group(kernel, "__memory", limit=(1 << 63) - 4096, used=9 * GIB, version=1)
    assert host.free_bytes() == 3 * GIB + GIB // 2


def test_a_container_sees_its_own_group_at_the_root_whatever_its_path_outside(kernel):
    kernel.meminfo(500 * GIB)
    kernel(proc__self__cgroup="4:memory:/docker/0123abcd\n")
    group(kernel, "__memory", limit=2 * GIB, used=GIB, version=1)
    assert host.free_bytes() == GIB


def test_a_group_over_its_limit_has_nothing_left(kernel):
    kernel.meminfo(GIB)
    kernel(proc__self__cgroup="0::/\n")
    group(kernel, "", limit=GIB, used=2 * GIB)
    assert host.free_bytes() == 0


@pytest.mark.parametrize("text", ["", "\n", "nonsense\n", "0::\n", "0::/../../elsewhere\n"])
def test_odd_lists_of_groups_are_passed_over(kernel, text):
    kernel.meminfo(GIB)
    kernel(proc__self__cgroup=text)
    assert host.free_bytes() == GIB


def test_this_kernel_counts_or_does_not():
    assert (kills := host.oom_kills()) is None or kills >= 0


def test_processes_ended_for_want_of_memory_are_counted_in_their_group(kernel):
    kernel(proc__self__cgroup="0::/pod/container\n")
    kernel(
        cgroup__pod__container__memory_events="low 0\nhigh 5\nmax 9\noom 3\noom_kill 2\noom_group_kill 0\n"
    )
    kernel(cgroup__pod__memory_events="oom_kill 7\n")
    assert host.oom_kills() == 2


def test_a_group_without_the_controller_is_counted_in_the_one_around_it(kernel):
    kernel(proc__self__cgroup="0::/user/session\n", cgroup__user__memory_events="oom_kill 7\n")
    assert host.oom_kills() == 7


def test_version_1_counts_in_another_file(kernel):
    kernel(proc__self__cgroup="9:cpu,cpuacct:/a\n4:memory:/a\n0::/\n")
    kernel(cgroup__memory__a__memory_oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    assert host.oom_kills() == 4


@pytest.mark.parametrize("text", ["", "oom 3\n", "oom_kill\n", "oom_kill many\n"])
def test_a_kernel_that_does_not_count_says_nothing(kernel, text):
    assert host.oom_kills() is None
    kernel(proc__self__cgroup="0::/\n", cgroup__memory_events=text)
    assert host.oom_kills() is None


def test_a_group_lives_while_one_of_it_runs():
    process = subprocess.Popen(["sleep", "30"], start_new_session=True)
    try:
        assert host.group_lives(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not host.group_lives(process.pid), "what ended and was not asked why still has its number"
    finally:
        process.kill()
        process.wait()
    assert not host.group_lives(process.pid)

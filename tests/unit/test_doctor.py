"""tools/doctor.py: each check says FAIL for what it is there to find, and the exit status follows."""

import socket
import sys
from pathlib import Path

import pytest

from tools import doctor

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def demo(tmp_path, monkeypatch):
    """The demo's configuration with its input files in place, in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / ".cache/tiny_moe-0"
    folder.mkdir(parents=True)
    for name in ("config.json", "train.jsonl", "heldout.jsonl"):
        (folder / name).write_text("{}")
    path = tmp_path / "demo.toml"
    path.write_text((ROOT / "examples/tiny_cpu/demo.toml").read_text())
    return path


def statuses(checks):
    return {check.name: check.status for check in checks}


def test_this_environment_is_fit(capsys):
    assert doctor.main([]) == 0
    printed = capsys.readouterr().out
    for name in ("python", "torch", "megatron-core", "sglang", "--enable-return-routed-experts", "--sleep-on-idle"):
        assert any(line.split()[:2] == ["OK", name] for line in printed.splitlines()), name


def test_every_problem_comes_with_a_remedy(demo, capsys):
    (demo.parent / ".cache/tiny_moe-0/train.jsonl").unlink()
    assert doctor.main(["--config", str(demo), "--url", "http://127.0.0.1:9"]) == 1
    lines = capsys.readouterr().out.splitlines()
    failed = [index for index, line in enumerate(lines) if line.strip().startswith("FAIL")]
    assert [lines[index].split()[1] for index in failed] == ["data.train", "answer"]
    assert all("->" in lines[index + 1] for index in failed)
    assert lines[-1].endswith("2 FAIL")


def test_good_configuration_passes(demo):
    cfg, checks = doctor.check_config(demo)
    assert cfg is not None
    assert set(statuses(checks).values()) == {"OK"}


def test_bad_configuration_fails_with_the_configurations_own_message(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text("[optin]\nlr = 1")
    cfg, checks = doctor.check_config(path)
    assert cfg is None
    assert [check.status for check in checks] == ["FAIL"]
    assert "did you mean 'optim'" in checks[0].remedy


def test_port_in_use(demo):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        demo.write_text(demo.read_text().replace("[rollout]", f"[rollout]\nport = {port}"))
        assert statuses(doctor.check_config(demo)[1])["rollout.port"] == "FAIL"
    assert statuses(doctor.check_config(demo)[1])["rollout.port"] == "OK"


def test_missing_api_key(demo, monkeypatch):
    demo.write_text(demo.read_text().replace("[rollout]", '[rollout]\napi_key_env = "DOCTOR_TEST_KEY"'))
    monkeypatch.delenv("DOCTOR_TEST_KEY", raising=False)
    assert statuses(doctor.check_config(demo)[1])["rollout.api_key_env"] == "FAIL"
    monkeypatch.setenv("DOCTOR_TEST_KEY", "secret")
    assert "rollout.api_key_env" not in statuses(doctor.check_config(demo)[1])


@pytest.mark.parametrize(
    ("package", "found", "status"),
    [
        ("torch", "2.13.0+cpu", "OK"),
        ("torch", "2.12.1", "WARN"),
        ("torch", None, "FAIL"),
        ("sglang", None, "WARN"),
        ("sglang", "0.5.20", "FAIL"),
        ("sglang", "0.5.23", "WARN"),
    ],
)
def test_package_versions(monkeypatch, package, found, status):
    monkeypatch.setattr(doctor, "version_of", lambda name: found)
    tested = doctor.TESTED[sys.version_info[:2]][package]
    check = doctor.compare_package(package, tested)
    assert (check.status, bool(check.remedy)) == (status, status != "OK")


def test_flags_are_read_from_definitions():
    definitions = "    sleep_on_idle: A[bool] = False\n"
    assert doctor.check_flag("sleep_on_idle", definitions).status == "OK"
    assert doctor.check_flag("enable_return_routed_experts", definitions).status == "FAIL"


@pytest.mark.parametrize(("version", "status"), [("0.5.21", "OK"), ("0.5.20", "FAIL"), ("None", "WARN")])
def test_version_of_a_server(version, status):
    assert doctor.compare_package_of_server(version).status == status


def test_unknown_gloo_interface(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    assert doctor.check_hostname().status == "FAIL"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert doctor.check_hostname().status == "OK"


def test_tested_versions_are_the_pinned_ones():
    pins = (ROOT / "requirements-cpu.txt").read_text()
    for python, versions in doctor.TESTED.items():
        operator = "<" if python == (3, 11) else ">="
        assert f'megatron-core=={versions["megatron-core"]}; python_version {operator} "3.12"' in pins
        for package in ("torch", "transformers"):
            assert f"\n{package}=={versions[package]}\n" in pins
        assert f'SGLANG="sglang=={versions["sglang"]}"' in (ROOT / "tools/install.sh").read_text()
        assert f"\nsglang=={versions['sglang']}\n" in (ROOT / "requirements-sglang.txt").read_text()

"""What is in deploy/, each by the tool that knows its kind, and that the parts agree.

No image is built and no cluster is asked: both need a registry. Containerfile, compose file and
manifests are checked against their specifications.
"""

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from memd.config import ServerSettings, build, flatten
from memd.units import parse_duration

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
YAML_FILES = sorted(
    path for suffix in ("*.yml", "*.yaml") for path in DEPLOY.rglob(suffix) if path.is_file()
)
SERVER = ServerSettings()
KUBERNETES_VERSION = "1.33"


def have(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not installed")


def run(*command: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(each) for each in command], capture_output=True, text=True, timeout=120, **more
    )


def read_unit(name: str) -> dict[str, str]:
    """The settings of a unit; the last of equal names."""
    lines = (DEPLOY / "systemd" / name).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and line[0] not in "#;")


# systemd


@have("systemd-analyze")
def test_the_units_are_valid(tmp_path: Path) -> None:
    for name in ("memd.service", "memd.socket"):
        text = (DEPLOY / "systemd" / name).read_text()
        # Where memd is installed is all that may be missing here.
        (tmp_path / name).write_text(text.replace("/opt/memd/bin/memd", "/bin/true"))
    done = run("systemd-analyze", "verify", tmp_path / "memd.service", tmp_path / "memd.socket")
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) not in done.stderr  # complaints name the file


@have("systemd-analyze")
def test_the_drop_in_is_valid_where_systemd_knows_it(tmp_path: Path) -> None:
    service, drop_in = tmp_path / "memd.service", tmp_path / "memd.service.d"
    text = (DEPLOY / "systemd/memd.service").read_text()
    service.write_text(text.replace("/opt/memd/bin/memd", "/bin/true"))
    drop_in.mkdir()
    shutil.copy(DEPLOY / "systemd/notify-reload.conf", drop_in)
    done = run("systemd-analyze", "verify", service)
    version = int(run("systemd-analyze", "--version").stdout.split()[1])
    complaints = [line for line in done.stderr.splitlines() if str(tmp_path) in line]
    if version >= 253:
        assert complaints == []
    else:
        assert [line.split(": ")[-1] for line in complaints] == [
            "Failed to parse service type, ignoring" + ": notify-reload"
        ] or all("notify-reload" in line for line in complaints)


@have("systemd-analyze")
def test_the_service_may_do_little() -> None:
    unit = DEPLOY / "systemd/memd.service"
    done = run("systemd-analyze", "security", "--offline=true", "--threshold=40", unit)
    assert done.returncode == 0, done.stdout.splitlines()[-1]


def test_the_times_of_the_unit_fit_the_settings() -> None:
    unit = read_unit("memd.service")
    settings = build({})
    assert parse_duration(unit["WatchdogSec"]) > settings.engine.hang_timeout
    assert parse_duration(unit["TimeoutStopSec"]) > settings.server.drain_timeout + 30
    # CUDA needs the devices, Triton runs what it compiles.
    assert not unit.keys() & {"PrivateDevices", "ProtectClock", "MemoryDenyWriteExecute"}


def test_the_socket_unit_is_what_memd_takes() -> None:
    from memd.listen import SOCKET_NAMES

    unit = read_unit("memd.socket")
    assert unit["FileDescriptorName"] in SOCKET_NAMES
    text = (DEPLOY / "systemd/memd.socket").read_text()
    assert f"ListenStream={SERVER.host}:{SERVER.port}\n" in text
    assert unit["SocketMode"] == SERVER.uds_mode


# containers


@have("hadolint")
def test_the_containerfile_is_clean() -> None:
    folder = DEPLOY / "container"
    done = run("hadolint", "--config", folder / "hadolint.yaml", folder / "Containerfile")
    assert done.returncode == 0, done.stdout


def test_the_image_holds_what_is_installed() -> None:
    text = (DEPLOY / "container/Containerfile").read_text()
    ignored = (DEPLOY / "container/Containerfile.dockerignore").read_text().splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    for folder in {package.split("/")[0] for package in packages}:
        assert f"COPY {folder} /src/{folder}\n" in text
        assert f"!{folder}" in ignored
    extras = text.split("/src[")[1].split("]")[0].split(",")
    assert set(extras) == set(project["project"]["optional-dependencies"])
    assert f"EXPOSE {SERVER.port}\n" in text
    assert "/health/live" in text
    assert "STOPSIGNAL SIGTERM\n" in text
    user = next(line for line in text.splitlines() if line.startswith("USER "))
    assert user.split()[1].split(":")[0] not in ("0", "root")


def test_the_settings_of_the_image_are_settings() -> None:
    from memd.config_sources import load

    text = (DEPLOY / "container/Containerfile").read_text()
    words = text.replace("\\\n", " ").split()
    set_there = dict(word.split("=", 1) for word in words if word.startswith("MEMD_"))
    server = load(None, (), set_there).server
    assert (server.host, str(server.keys_file)) == ("0.0.0.0", "/var/lib/memd/keys.jsonl")
    assert len(set_there) == 2


def test_the_compose_file_follows_the_specification() -> None:
    compose_spec = pytest.importorskip("compose_spec")
    text = (DEPLOY / "compose/compose.yaml").read_text()
    compose = compose_spec.PyCompose.from_yaml(text)
    compose.validate()
    assert set(compose.service_names()) == {"memd", "dashboard", "prometheus", "grafana"}


@pytest.mark.skipif(
    shutil.which("docker") is None or run("docker", "compose", "version").returncode != 0,
    reason="docker compose is not installed",
)
def test_docker_compose_takes_the_file() -> None:
    done = run("docker", "compose", "-f", DEPLOY / "compose/compose.yaml", "config", "--quiet")
    assert done.returncode == 0, done.stderr


def test_what_the_compose_file_mounts_is_there() -> None:
    compose = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())
    for name, service in compose["services"].items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / "compose" / source).exists(), f"{name}: {source}"
            else:
                assert source in compose["volumes"]
        tag = service["image"].rpartition(":")[2]
        assert (tag == "latest") == service["image"].startswith("memd:")
        # Nothing is open beyond this machine.
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    memd = compose["services"]["memd"]
    assert parse_duration(memd["stop_grace_period"]) > SERVER.drain_timeout + 30
    assert (DEPLOY / "compose" / memd["build"]["context"]).resolve() == ROOT
    assert (ROOT / memd["build"]["dockerfile"]).is_file()


def test_the_containers_know_the_commands_they_run() -> None:
    from typer.testing import CliRunner

    from memd.cli import app

    compose = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())
    command = compose["services"]["dashboard"]["command"]
    result = CliRunner().invoke(app, [command[0], "--help"])
    assert result.exit_code == 0, result.output
    for option in (word for word in command if word.startswith("--")):
        assert option in result.output


@have("promtool")
def test_prometheus_takes_its_file(tmp_path: Path) -> None:
    text = (DEPLOY / "compose/prometheus.yml").read_text()
    (tmp_path / "key").write_text("secret")
    written = text.replace("/run/secrets/metrics-key", str(tmp_path / "key"))
    (tmp_path / "prometheus.yml").write_text(written)
    shutil.copy(DEPLOY / "prometheus/memd.rules.yml", tmp_path)
    done = run("promtool", "check", "config", tmp_path / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_grafana_finds_its_data_source_and_dashboard() -> None:
    compose = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())
    mounts = dict(each.split(":")[:2] for each in compose["services"]["grafana"]["volumes"])
    provisioning = DEPLOY / "grafana/provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards/memd.yml").read_text())["providers"]
    folder = provider["options"]["path"]
    assert mounts["../grafana/memd.json"].startswith(f"{folder}/")
    (source,) = yaml.safe_load((provisioning / "datasources/memd.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert json.loads((DEPLOY / "grafana/memd.json").read_text())["panels"]


# Kubernetes


def manifests() -> list[dict[str, Any]]:
    found = []
    kustomization = yaml.safe_load((DEPLOY / "kubernetes/kustomization.yaml").read_text())
    for name in kustomization["resources"]:
        found += list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()))
    return found


def manifest(kind: str) -> dict[str, Any]:
    return next(each for each in manifests() if each["kind"] == kind)


@have("kubectl")
def test_kustomize_builds_it() -> None:
    done = run("kubectl", "kustomize", DEPLOY / "kubernetes")
    assert done.returncode == 0, done.stderr
    built = list(yaml.safe_load_all(done.stdout))
    assert len(built) == len(manifests()) + 1  # and the settings
    assert {each["metadata"].get("namespace") for each in built} == {None, "memd"}


def test_the_manifests_follow_the_schemas_of_kubernetes() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    core = [each for each in manifests() if "coreos" not in each["apiVersion"]]
    assert len(core) == 5
    for each in core:
        validator.validate(each, KUBERNETES_VERSION, strict=True)
    broken = manifest("Deployment")
    broken["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(validator.ValidationError):
        validator.validate(broken, KUBERNETES_VERSION, strict=True)


@pytest.mark.parametrize("kind", ["PodMonitor", "PrometheusRule"])
def test_the_manifests_follow_the_models_of_the_prometheus_operator(kind: str) -> None:
    models = pytest.importorskip("cloudcoil.models.prometheus_operator.v1")
    written = manifest(kind)
    read = getattr(models, kind).model_validate(written)
    kept = read.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert kept["spec"] == written["spec"]  # a name that it does not know would be lost


def test_the_pod_has_time_to_drain_and_is_probed() -> None:
    pod = manifest("Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    settings = flatten(yaml.safe_load((DEPLOY / "kubernetes/memd.yaml").read_text()))
    server = build(settings).server
    before = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > server.drain_timeout + before + 30
    assert container["startupProbe"]["httpGet"]["path"] == "/health/ready"
    assert container["readinessProbe"]["httpGet"]["path"] == "/health/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health/live"
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": server.port}
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(server.keys_file.parent) in mounted  # type: ignore[union-attr]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert volumes == {mount["name"] for mount in container["volumeMounts"]}


def test_prometheus_finds_the_pod_under_the_job_of_the_rules() -> None:
    labels = manifest("Deployment")["spec"]["template"]["metadata"]["labels"]
    spec = manifest("PodMonitor")["spec"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    assert labels[spec["jobLabel"]] == "memd"
    rules = (DEPLOY / "prometheus/memd.rules.yml").read_text()
    assert 'job="memd"' in rules
    scraped = yaml.safe_load((DEPLOY / "compose/prometheus.yml").read_text())
    assert scraped["scrape_configs"][0]["job_name"] == "memd"


def test_the_rules_for_kubernetes_are_the_rules() -> None:
    command = (sys.executable, "-m", "memd.cli", "alerts", "render", "--kubernetes")
    rendered = run(*command, cwd=ROOT).stdout
    assert (DEPLOY / "kubernetes/prometheusrule.yaml").read_text() == rendered
    rules = yaml.safe_load((DEPLOY / "prometheus/memd.rules.yml").read_text())
    assert manifest("PrometheusRule")["spec"] == rules


# all


@have("yamllint")
@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_the_yaml_is_clean(path: Path) -> None:
    done = run("yamllint", "--strict", "--config-data", _YAMLLINT, path)
    assert done.returncode == 0, done.stdout


_YAMLLINT = """
extends: default
rules:
  document-start: disable
  line-length: disable  # PromQL
  comments: {min-spaces-from-content: 1}
  indentation: {indent-sequences: whatever}
  truthy: {check-keys: false}
"""

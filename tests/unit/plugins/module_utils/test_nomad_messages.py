# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every sentence about Nomad as people read it; C(messages.txt) has one a line, with the case it is of."""

from __future__ import annotations

import functools
import http.client
import re
import socket
import ssl
import threading
import urllib.error
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import gpu_verdicts, nomad, nomad_jobs
from ansible_collections.gpufarm.core.plugins.module_utils import problem as problem_utils
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_proof.listing import Listing
from ansible_collections.gpufarm.core.plugins.module_utils.nomad import client as nomad_client
from ansible_collections.gpufarm.core.plugins.module_utils.nomad_jobs import listing as job_listing
from ansible_collections.gpufarm.core.plugins.module_utils.nomad_jobs import obstacles, running
from ansible_collections.gpufarm.core.plugins.modules import nomad_gpu_job_verify
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import nomad_helper as farm

FILE = farm.FIXTURES / "messages.txt"
NODE = farm.make_node(0, 2)
ADDRESS = "https://nomad.example.com:4646/v1/nodes"
PIN = nomad_jobs.Pin("6f147e38", "gpu01", "GPU-1", "Tesla T4")


def changed(node: dict[str, Any] = NODE, **fields: Any) -> dict[str, Any]:
    return {**node, **fields}


def with_instance(**fields: Any) -> dict[str, Any]:
    node = farm.make_node(0, 1)
    node["NodeResources"]["Devices"][0]["Instances"][0].update(fields)
    return node


def without_attributes() -> dict[str, Any]:
    node = farm.make_node(0, 1)
    node["NodeResources"]["Devices"][0]["Attributes"] = {}
    return node


def mig_node() -> dict[str, Any]:
    node = farm.make_node(0, 2)
    group = node["NodeResources"]["Devices"][0]
    group["Name"] = "NVIDIA A100 MIG 1g.10gb"
    group["Instances"][0]["ID"] = "MIG-1"
    return node


def problems() -> Iterator[tuple[str, str]]:
    name = NODE["Name"]
    plain = nomad.Expected(name)
    both = tuple(farm.uuid_of(0, gpu) for gpu in range(2))
    cases: list[tuple[nomad.Expected, list[dict[str, Any]]]] = [
        (nomad.Expected("lost"), [NODE]),
        (plain, [changed(ID="b"), changed(ID="a")]),
        (plain, [changed(Status="down")]),
        (plain, [changed(Status="")]),
        (plain, [changed(SchedulingEligibility="ineligible")]),
        (plain, [changed(SchedulingEligibility="")]),
        (plain, [changed(Drain=True)]),
        (plain, [NODE, changed(farm.make_node(1, 1))]),
        (plain, [NODE, changed(farm.make_node(1, 3))]),
        (plain, [farm.make_node(0, 0)]),
        (nomad.Expected(name, count=1), [farm.make_node(0, 0)]),
        (nomad.Expected(name, count=2), [farm.make_node(0, 0)]),
        (nomad.Expected(name, count=1), [NODE]),
        (nomad.Expected(name, count=3), [NODE]),
        (nomad.Expected(name, count=2), [farm.make_node(0, 1)]),
        (nomad.Expected(name, uuids=both), [farm.make_node(0, 1)]),
        (nomad.Expected(name, uuids=both[:1]), [NODE]),
        (nomad.Expected(name, count=3, uuids=both), [NODE]),
        (nomad.Expected(name, count=3, models=("Tesla T4",)), [NODE]),
        (nomad.Expected(name, models=("Tesla T4", "A", "A")), [NODE]),
        (nomad.Expected(name, models=()), [NODE]),
        (nomad.Expected(name, model_counts={farm.MODEL: 3, "T4": 0}), [NODE]),
        (nomad.Expected(name, model_counts={"T4": 0}), [NODE]),
        (nomad.Expected(name, memory_mib_min=81560), [farm.make_node(0, 1)]),
        (nomad.Expected(name, memory_mib_min=1), [without_attributes()]),
        (nomad.Expected(name, driver_version="590.1"), [NODE]),
        (nomad.Expected(name, driver_version="590.1"), [without_attributes()]),
        (nomad.Expected(name, mig=True), [mig_node()]),
        (nomad.Expected(name, mig=False), [mig_node()]),
        (nomad.Expected(name, mig_profiles={"1g.10gb": 2, "2g.20gb": 0}), [mig_node()]),
        (nomad.Expected(name, mig_profiles={}), [mig_node()]),
        (plain, [with_instance(Healthy=False, HealthDescription="off the bus")]),
        (plain, [with_instance(Healthy=False, HealthDescription="")]),
        (plain, [NODE, changed(ID="c", Name="clone"), changed(ID="d", Name="clone two")]),
    ]
    for wanted, nodes in cases:
        actual = [nomad.describe_node(node) for node in nodes]
        for verdict in nomad.compare([wanted], actual, allow_extra_nodes=False, require_eligible=True):
            for problem in verdict.problems:
                yield problem.code, problem.message


def told(act: Callable[[], Any]) -> str:
    with pytest.raises(nomad.NomadError) as caught:
        act()
    return f"{caught.value} [{caught.value.transient}, {caught.value.status}]"


def refused(status: int, body: str = "", address: str = ADDRESS, location: str | None = None) -> str:
    return told(lambda: nomad_client._refused(address, status, body, location))


def unreachable(error: Exception) -> str:
    return told(lambda: nomad_client._unreachable(ADDRESS, error))


def certificate_error(why: str = "") -> ssl.SSLCertVerificationError:
    return ssl.SSLCertVerificationError(1, f"[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed{why}")


def client_errors() -> Iterator[tuple[str, str]]:
    yield "refused", refused(403, "Permission denied")
    yield "refused", refused(403)
    yield "refused", refused(307, "", location="http://evil.example/")
    yield "refused", refused(400, "bad filter", f"{ADDRESS}?filter=x")
    yield "refused", refused(400, "bad")
    yield "refused", refused(404, "not here")
    yield "refused", refused(429)
    yield "refused", refused(499)
    yield "refused", refused(500, "No cluster leader")
    yield "unreachable", unreachable(urllib.error.URLError(ConnectionRefusedError(111, "Connection refused")))
    yield "unreachable", unreachable(TimeoutError())
    yield "unreachable", unreachable(http.client.IncompleteRead(b"half"))
    yield "unreachable", unreachable(urllib.error.URLError(certificate_error()))
    yield "unreachable", unreachable(certificate_error())
    # By a clock that is wrong both are said of certificates that are good.
    for why in ("certificate has expired", "certificate is not yet valid"):
        yield "unreachable", unreachable(urllib.error.URLError(certificate_error(f": {why}")))
    alert = ssl.SSLError(1, "[SSL] tlsv13 alert certificate required")
    yield "unreachable", unreachable(urllib.error.URLError(alert))
    # As it comes while an answer is read.
    alert.reason = "TLSV13_ALERT_CERTIFICATE_REQUIRED"
    yield "unreachable", unreachable(alert)
    # That of the one who asks.
    own = ssl.SSLError(1, "[SSL: SSLV3_ALERT_CERTIFICATE_EXPIRED] sslv3 alert certificate expired")
    yield "unreachable", unreachable(own)
    yield "client", told(lambda: nomad.Client(nomad.Connection(address="nomad:4646")))
    yield "client", told(lambda: nomad.Client(nomad.Connection(address="https://robot:s3cret@nomad:4646")))
    yield "client", told(lambda: nomad.Client(nomad.Connection(token="a\nb")))
    files = {"ca_cert": "/none/ca.pem", "client_cert": "/none/cert.pem"}
    yield "client", told(lambda: nomad.Client(nomad.Connection(address="https://localhost", **files)))
    yield "client", told(lambda: nomad.name_filter(["a", 'b"']))


def answers(*bodies: bytes) -> Iterator[str]:
    """What is said of an agent with these answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"

        def serve() -> None:
            for body in bodies:
                connection = server.accept()[0]
                connection.recv(65536)
                connection.sendall(body)
                connection.close()

        threading.Thread(target=serve, daemon=True).start()
        client = nomad.Client(nomad.Connection(address=address))
        asks: tuple[Callable[[], Any], ...] = (
            lambda: client.call("GET", "/v1/x"),
            lambda: list(client.items("/v1/x", {}).items),
            lambda: client.text("/v1/x", {}),
        )
        for number in range(len(bodies)):
            # How much of it had come depends on the moment.
            yield re.sub(r"IncompleteRead\(.*?\)", "half", told(asks[number % 3]).replace(address, "http://agent"))


def broken_answers() -> Iterator[tuple[str, str]]:
    page = b"HTTP/1.0 200 OK\r\n\r\n"
    cut = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n64\r\n"
    lists = (b"<html>login</html>", b'[{"a": 1} {', b"[1]", b'[{"a": 1}', b"[{]", b"nulls", b"")
    bodies = [body for wrong in lists for body in (page + b"<html>", page + wrong, cut)]
    for said in answers(*bodies, cut + b"{", cut + b"[{}", cut):
        yield "answer", said


def sentence(finding: problem_utils.Finding | None) -> str:
    assert finding
    return nomad_jobs.result_of(PIN, finding).message or ""


def listing(*uuids: str, wsl: bool = False, visible: str = "void") -> Listing:
    return Listing([(uuid, ()) for uuid in uuids], visible, wsl, 0)


def findings() -> Iterator[tuple[str, str]]:
    nodes = [changed(Status="down"), farm.make_node(1, 0), changed(farm.make_node(2, 1), Status="")]
    _selected, wrong = nomad_jobs.select_nodes(nodes, ["lost", *(node["Name"] for node in nodes)])
    yield from ((problem.code, problem.message) for problem in wrong)
    node = nomad.describe_node(NODE)
    for state in ({"drain": True}, {"eligibility": "ineligible"}, {"eligibility": ""}):
        reason = nomad_jobs.closed_to_work({**node, **state})
        yield "closed", sentence(nomad_jobs.closed_finding(node, f"that {reason}"))
    yield "busy", sentence(nomad_jobs.busy_finding(None))
    yield "busy", sentence(nomad_jobs.busy_finding({"id": "5456", "job_id": "training", "namespace": "ml"}))
    seen: list[tuple[list[str], Listing, str]] = [
        (["GPU-2"], listing("GPU-1"), "docker"),
        ([], listing("GPU-1"), "docker"),
        (["GPU-1"], listing(), "docker"),
        (["GPU-1"], listing(wsl=True), "docker"),
        (["GPU-1"], listing(), "raw_exec"),
        (["GPU-1"], listing("GPU-2", "GPU-3"), "docker"),
        (["GPU-1"], listing("GPU-2", wsl=True), "docker"),
        (["GPU-1"], listing("GPU-2"), "raw_exec"),
        (["GPU-1"], listing("GPU-1", "GPU-2"), "docker"),
        (["GPU-1"], listing("GPU-1", visible="all"), "raw_exec"),
        (["GPU-1"], Listing([("GPU-1", ())], None, False, 0), "raw_exec"),
    ]
    for assigned, what, driver in seen:
        finding, _seen, _isolated = job_listing.judge_listing(PIN, assigned, what, driver)
        yield "seen", f"{finding.code if finding else None}: {sentence(finding)}"


def placements() -> Iterator[tuple[str, str]]:
    metrics: list[tuple[dict[str, Any], str]] = [
        ({"ConstraintFiltered": {"missing drivers": 1}, "DimensionExhausted": {"memory": 1}}, "docker"),
        ({"ConstraintFiltered": {"missing drivers": 1}}, "raw_exec"),
        ({"ConstraintFiltered": {"missing drivers": 1}}, "java"),
        ({"ConstraintFiltered": {"missing devices": 1}}, "docker"),
        ({"ConstraintFiltered": {"b": 1, "a": 1}}, "docker"),
        ({"DimensionExhausted": {"devices: no devices match request": 1}}, "docker"),
        ({"DimensionExhausted": {"memory": 1}, "QuotaExhausted": ["gpu limit"]}, "docker"),
        ({"NodesEvaluated": 3, "ConstraintFiltered": {"${node.unique.id} = 6f147e38": 3}}, "docker"),
        ({"NodesEvaluated": 3, "ConstraintFiltered": {"${node.unique.id} = 6f147e38": 2}}, "docker"),
        ({}, "docker"),
    ]
    for metric, driver in metrics:
        obstacle = obstacles.explain_placement(metric, PIN, driver)
        code = f"{obstacle.finding.code}, {obstacle.exhausted}, {obstacle.device}"
        yield "placement", f"{code}: {sentence(obstacle.finding)}"


def failures() -> Iterator[tuple[str, str]]:
    for event, stderr, stopped in (
        ("requested docker runtime 'nvidia' was not found", "", None),
        ("unknown or invalid runtime name", "", None),
        ("Exit Code: 127", "sh: nvidia-smi: not found", None),
        ("Failed to pull `cuda:9`", "", None),
        ("manifest unknown", "", None),
        ("no such image", "", None),
        ("unresolvable CDI devices", "", None),
        ("prestart hook", "NVML failed", None),
        ("OCI", "", "the node was lost"),
        ("Exit Code: 1", "\n", None),
        ("", "", None),
    ):
        events = [{"Type": "Driver Failure", "DisplayMessage": event}]
        yield "task", sentence(obstacles.failed_task(events, stderr, stopped))
    run = nomad_jobs.Run(nomad.Client(nomad.Connection()), nomad_jobs.Settings(timeout=2.5), "x", 0)
    yield "timeout", sentence(running._out_of_time(run, "that it took long"))
    yield "log", sentence(running._unreadable(None))
    for status in (403, 500):
        error = nomad.NomadError("HTTP 403", "a", "b", status=status)
        yield "log", sentence(running._unreadable(error))


def options() -> Iterator[tuple[str, str]]:
    entry = dict.fromkeys(
        ("count", "uuids", "models", "memory_mib_min", "driver_version", "mig", "mig_profiles", "mig_unknown")
    )
    named = {"node": "a", **entry}
    for items in ([], [named, named], [{**named, "models": {"T4": "many"}}], [{**named, "mig_profiles": {"a": []}}]):
        with pytest.raises(problem_utils.FoundError) as caught:
            gpu_verdicts.read_expected(items)
        yield "expected", str(caught.value)
    spec = nomad_gpu_job_verify.argument_spec()
    usual = {name: option.get("default") for name, option in spec.items()}
    for given in (
        {"priority": 0}, {"priority": 11}, {"sample": 0}, {"memory_mib": 9}, {"cpu_mhz": 0}, {"timeout": 0},
        {"parallel": 0}, {"nodes": []}, {"image": ""},
    ):  # fmt: skip
        yield "option", told(functools.partial(nomad_gpu_job_verify.read_settings, {**usual, **given}))
    left = [problem_utils.problem_of("gpu01", "job_left", "one", "none", "purge it")]
    for status in (403, 500):
        error = nomad.NomadError(f"HTTP {status}", "a", "b", status=status)
        for jobs_left, namespace in ((left, None), (left, "ops"), ([], None)):
            yield "ended", told(functools.partial(nomad_gpu_job_verify._refused, error, jobs_left, namespace))


def everything() -> Iterable[str]:
    for part in (problems, client_errors, broken_answers, findings, placements, failures, options):
        yield from (f"{case}: {text}" for case, text in part())


def test_every_sentence_is_the_one_that_was_read_by_somebody() -> None:
    assert list(everything()) == FILE.read_text(encoding="utf-8").splitlines()

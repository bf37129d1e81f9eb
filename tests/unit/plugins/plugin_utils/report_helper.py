# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Farms of any size as report.build gets them, made of recordings that the real parser reads.

Every GPU is a recorded one with a UUID of its own; what nvidia_gpu_health and nomad_gpu_info return about it is laid
around it in their form. As a script it renders the page of such a farm without Ansible:

    PYTHONPATH=.collections python tests/unit/plugins/plugin_utils/report_helper.py --nodes 5000 --write /tmp/page.html
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any, cast

import jinja2
from ansible_collections.gpufarm.core.plugins.filter.farm_report import farm_report
from ansible_collections.gpufarm.core.plugins.module_utils import kubernetes, nvidia_smi
from ansible_collections.gpufarm.core.plugins.modules import kubernetes_gpu_info
from ansible_collections.gpufarm.core.plugins.plugin_utils import report, report_page

CORPUS = Path(__file__).parents[1] / "module_utils/nvidia_smi_corpus"
TEMPLATES = Path(__file__).parents[4] / "roles" / "farm" / "templates"
H100 = "580.159.04-h100"
T4 = "515.105.01-tesla-t4"
RTX4090 = "535.86.05-rtx-4090"
MIG = "535.54.03-a100-80gb-mig"
MADE_AT = "2026-03-01T12:00:10Z"
ASKED_AT = "2026-03-01T12:00:00Z"
PRICES = {
    "NVIDIA H100 80GB HBM3": {"relative_throughput": 2.4, "price_per_hour": 3.0},
    "Tesla T4": {"relative_throughput": 0.2, "price_per_hour": 0.5},
}


@functools.cache
def recording(name: str) -> dict[str, Any]:
    return nvidia_smi.parse_query_xml((CORPUS / f"{name}.xml").read_text(encoding="utf-8"))


def uuid_of(node: int, gpu: int, kind: str = "GPU") -> str:
    return f"{kind}-{node:08x}-0000-4000-8000-{gpu:012x}"


def facts(name: str, node: int, gpus: int, **values: Any) -> dict[str, Any]:
    """What nvidia_smi_facts returns for a node of this many GPUs of one recording."""
    recorded = recording(name)
    found = []
    for index in range(gpus):
        gpu = copy.deepcopy(recorded["gpus"][0])
        gpu.update(index=index, uuid=uuid_of(node, index), pci_bus_id=f"00000000:{index + 1:02X}:00.0", processes=[])
        for number, device in enumerate(gpu["mig_devices"] or []):
            device.update(uuid=uuid_of(node, index * 16 + number, "MIG"), profile="1g.10gb", memory_total_mib=9728)
        gpu.update(values)
        found.append(gpu)
    answer = nvidia_smi.empty_facts("linux")
    answer.update(
        available=True, driver_version=recorded["driver_version"], cuda_version=recorded["cuda_version"], gpus=found
    )
    return answer


def health(smi: dict[str, Any], problems: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """What nvidia_gpu_health returns around these facts."""
    told = problems or []

    def verdict(found: list[dict[str, Any]]) -> str:
        severities = {problem["severity"] for problem in found}
        return "critical" if "critical" in severities else "warning" if severities else "ok"

    gpus = []
    for gpu in smi["gpus"]:
        own = [problem for problem in told if problem["uuid"] == gpu["uuid"]]
        keys = ("index", "uuid", "name", "pci_bus_id")
        gpus.append({**{key: gpu[key] for key in keys}, "verdict": verdict(own), "problems": own})
    return {
        "changed": False,
        "verdict": verdict(told),
        "gpus": gpus,
        "problems": told,
        "reason": told[0]["message"] if told else None,
        "checks": {},
        "nvidia_smi": smi,
    }


def problem(gpu: dict[str, Any], code: str = "xid_79", severity: str = "critical") -> dict[str, Any]:
    found, expected, action = "Xid 79 (the GPU fell off the bus) once", "no Xid 79", "reboot"
    next_step = "drain the node and power-cycle it"
    return {
        "code": code,
        "severity": severity,
        "uuid": gpu["uuid"],
        "pci_bus_id": gpu["pci_bus_id"],
        "found": found,
        "expected": expected,
        "action": action,
        "message": f"GPU {gpu['uuid']}: found {found}. Expected: {expected}. Next step: {next_step}.",
    }


def answer(name: str, result: dict[str, Any], **values: Any) -> dict[str, Any]:
    """The entry of one host, as report.yml notes it."""
    entry = {"name": name, "nomad_name": name, "asked_at": ASKED_AT, "gpus_expected": None, "health": result}
    return {**entry, **values}


def allocation(job: str, number: int = 0, namespace: str = "default") -> dict[str, Any]:
    return {
        "id": f"{number:08x}-1111-4444-8888-000000000000",
        "namespace": namespace,
        "job_id": job,
        "task_group": "group",
        "task": "task",
        "client_status": "running",
    }


def nomad_gpu(gpu: dict[str, Any], driver: str | None, held: dict[str, Any] | None = None) -> dict[str, Any]:
    """One device as nomad_gpu_info returns it."""
    model = gpu["name"]
    return {
        "uuid": gpu["uuid"],
        "model": model,
        "vendor": "nvidia",
        "type": "gpu",
        "device_id": f"nvidia/gpu/{model}",
        "memory_mib": gpu["memory_total_mib"],
        "driver_version": driver,
        "mig_profile": None,
        "mig": gpu["uuid"].startswith("MIG-"),
        "healthy": True,
        "health_description": None,
        "pci_bus_id": gpu["pci_bus_id"],
        "numa_node": None,
        "allocation": held,
        "allocation_id": held["id"] if held else None,
    }


def nomad_node(name: str, gpus: list[dict[str, Any]], **values: Any) -> dict[str, Any]:
    node = {
        "id": f"{name}-5555-4444-8888-000000000000",
        "name": name,
        "address": "192.0.2.10",
        "status": "ready",
        "eligibility": "eligible",
        "drain": False,
        "datacenter": "dc1",
        "node_pool": "default",
        "node_class": None,
        "version": "1.11.3",
        "create_index": 10,
        "modify_index": 20,
        "closed_for": None,
        "gpus": gpus,
    }
    return {**node, **values}


def devices(smi: dict[str, Any], held: dict[int, str] | None = None) -> list[dict[str, Any]]:
    """A node's GPUs as its device plugin reports them: MIG devices instead of the GPU that they are on."""
    jobs = held or {}
    found = []
    for gpu in smi["gpus"]:
        if gpu["mig_mode"] == "Enabled":
            parts = [
                {**gpu, "uuid": device["uuid"], "name": f"{gpu['name']} MIG {device['profile']}"}
                for device in gpu["mig_devices"]
            ]
        else:
            parts = [gpu]
        for part in parts:
            number = len(found)
            own = allocation(jobs[number], number) if number in jobs else None
            found.append({**nomad_gpu(part, smi["driver_version"], own), "mig_profile": None})
    return found


def server(
    nodes: list[dict[str, Any]], namespaces: list[dict[str, Any]] | None = None, **values: Any
) -> dict[str, Any]:
    result = {"nodes": nodes, "usage": {"namespaces": namespaces or []}}
    entry = {"server": "control", "asked_at": MADE_AT, "result": result}
    return {**entry, **values}


def kubernetes_node(name: str, gpus: int, well: int | None = None, **values: Any) -> dict[str, Any]:
    """A node as kubernetes_gpu_info returns it, without GPU feature discovery; C(pods) are names to numbers of GPUs."""
    resource = values.pop("resource", "nvidia.com/gpu")
    pods = [
        {"namespace": "lab", "name": pod, "phase": "Running", "gpus": {resource: number}}
        for pod, number in values.pop("pods", {}).items()
    ]
    item = {
        "metadata": {"name": name, "uid": f"{name}-uid", "resourceVersion": "7", **values.pop("metadata", {})},
        "spec": {"unschedulable": True} if values.pop("cordoned", False) else {},
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "capacity": {resource: str(gpus)},
            "allocatable": {resource: str(gpus if well is None else well)},
            "nodeInfo": {"kubeletVersion": "v1.34.1"},
        },
    }
    node = kubernetes.with_uses(kubernetes.describe_node(item), cast(list[kubernetes.PodUse], pods))
    return kubernetes_gpu_info.told(node)


def cluster(nodes: list[dict[str, Any]], *hosts: str, **values: Any) -> dict[str, Any]:
    """What report.yml notes of a cluster."""
    entry = {"host": "control", "hosts": list(hosts), "asked_at": MADE_AT, "result": {"nodes": nodes}}
    return {**entry, **values}


def farm(nodes: int, gpus: int = 8, name: str = H100, sick: int = 0) -> dict[str, Any]:
    """A whole farm's arguments for report.build; the first C(sick) nodes have a sick GPU."""
    answers = []
    known = []
    for number in range(nodes):
        host = f"gpu{number:05d}"
        smi = facts(name, number, gpus)
        for gpu in smi["gpus"]:
            gpu["utilization_gpu_percent"] = (number * 37 + gpu["index"] * 13) % 101
            gpu["power_draw_w"] = 70.0 + 6 * gpu["utilization_gpu_percent"]
        problems = [problem(smi["gpus"][0])] if number < sick else []
        held = {index: f"training-{number // 4}" for index in range(gpus) if (number + index) % 4}
        answers.append(answer(host, health(smi, problems)))
        known.append(nomad_node(host, devices(smi, held)))
    return {"hosts": [entry["name"] for entry in answers], "answers": answers, "servers": [server(known)]}


def document(arguments: dict[str, Any], history: str = "", **options: Any) -> dict[str, Any]:
    return build(arguments, history, **options)[0]


def build(arguments: dict[str, Any], history: str = "", **options: Any) -> tuple[dict[str, Any], str | None]:
    made_at = options.pop("made_at", MADE_AT)
    acceptances = {key: options.pop(key, "") for key in ("accepted", "accepted_failure")}
    return report.build(
        arguments["hosts"],
        arguments["answers"],
        arguments["servers"],
        report.Options(**{"models": PRICES, **options}),
        made_at=made_at,
        history=history,
        regions=arguments.get("regions"),
        kubernetes=arguments.get("kubernetes"),
        **acceptances,
        certificates=arguments.get("certificates"),
    )


@functools.cache
def template() -> jinja2.Template:
    """The page's template with the settings that Ansible renders it with, for sizes that should not take minutes."""
    loader = jinja2.FileSystemLoader(TEMPLATES)
    environment = jinja2.Environment(loader=loader, trim_blocks=True, undefined=jinja2.StrictUndefined)
    return environment.get_template("report.html.j2")


def render(data: dict[str, Any]) -> str:
    return template().render(page=report_page.page(data))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--sick", type=int, default=0)
    parser.add_argument("--limit", type=float, help="end with 1 above so many seconds of the processor")
    parser.add_argument("--write", type=Path, help="write the page there")
    options = parser.parse_args()
    arguments = farm(options.nodes, options.gpus, sick=options.sick)
    # Of the processor: what other work on the machine takes from it says nothing about the report.
    began = time.process_time()
    built = farm_report(**arguments, models=PRICES, made_at=MADE_AT)
    filtered = time.process_time()
    text = template().render(page=built["page"])
    rendered = time.process_time()
    if options.write:
        options.write.write_text(text, encoding="utf-8")
    figures = {
        "gpus": options.nodes * options.gpus,
        "page_mb": round(len(text.encode()) / 1e6, 2),
        "json_mb": round(len(built["json"].encode()) / 1e6, 2),
        "filter_cpu_s": round(filtered - began, 2),
        "render_cpu_s": round(rendered - filtered, 2),
        "cpu_s": round(rendered - began, 2),
    }
    sys.stdout.write(f"{json.dumps(figures)}\nreport: {figures['cpu_s']} s of Python (limit {options.limit})\n")
    return int(options.limit is not None and figures["cpu_s"] > options.limit)


if __name__ == "__main__":
    sys.exit(main())

# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The report's document as the texts of its page.

C(page) is all that the template needs: it only loops and escapes. How much of a large farm is shown in full is decided
here, because a browser lays out every row, whether somebody looks at it or not.
"""

from __future__ import annotations

import datetime
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.facts import computes
from ansible_collections.gpufarm.core.plugins.plugin_utils.report import (
    VERDICTS,
    Benchmark,
    Document,
    Gpu,
    JobUse,
    NamespaceUse,
    Node,
    Problem,
    is_over,
    may_have_pods,
    mean,
    parse_time,
    total,
)

DETAILED_NODES = 60
"""So many nodes get a table of their own; the others share groups, because a browser has to lay all of it out."""
OPEN_NODES = 6
PROBLEM_ROWS = 8
TABLE_ROWS = 40
NAMES = 8

WORDS = {"critical": "critical", "warning": "warning", "ok": "healthy", "unknown": "not known"}
STATES = {
    "unreachable": "unreachable",
    "failed": "check failed",
    "not_asked": "not asked",
    "not_in_inventory": "not in the inventory",
}
FIELDS = {
    "driver_version": "Driver",
    "cuda_version": "CUDA",
    "vbios_version": "VBIOS",
    "gsp_firmware_version": "GSP firmware",
    "nomad_driver_version": "Driver in Nomad",
}
UNKNOWN = "\N{EN DASH}"


def count_text(number: float | None, singular: str = "", plural: str = "") -> str:
    """A number for people, with its noun; shares of GPUs keep one digit."""
    if number is None:
        return UNKNOWN
    text = f"{number:,.0f}" if float(number).is_integer() else f"{number:,.1f}"
    noun = singular if number == 1 else plural or f"{singular}s"
    return f"{text} {noun}" if singular else text


def _percent_text(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f} %"


def power_text(value_w: float | None) -> str:
    if value_w is None:
        return UNKNOWN
    if value_w >= 1_000_000:
        return f"{value_w / 1_000_000:,.2f} MW"
    return f"{value_w / 1000:,.1f} kW" if value_w >= 1000 else f"{value_w:,.0f} W"


def memory_text(used_mib: float | None, total_mib: float | None) -> str:
    if total_mib is None:
        return UNKNOWN
    total = f"{total_mib / 1024:,.0f} GiB"
    return f"of {total}" if used_mib is None else f"{used_mib / 1024:,.1f} of {total}"


def _plain(value: float | None, digits: int = 2) -> str:
    if value is None:
        return UNKNOWN
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _money(value: float | None, currency: str) -> str:
    return UNKNOWN if value is None else f"{value:,.2f} {currency}"


def time_text(text: str | None) -> str:
    return f"{parse_time(text).astimezone(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC" if text else "never"


def age_text(asked_at: str | None, made_at: str) -> str:
    """How old a value is when the page is made."""
    if not asked_at:
        return UNKNOWN
    seconds = max(0, round((parse_time(made_at) - parse_time(asked_at)).total_seconds()))
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"


def _names(names: Sequence[str], limit: int = NAMES) -> str:
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest:,} more" if rest > 0 else "")


def _share(part: float | None, whole: float | None) -> int | None:
    """Percent for a bar, never outside of it."""
    return None if part is None or not whole else max(0, min(100, round(part / whole * 100)))


def _job(held: Mapping[str, Any]) -> str:
    namespace = held.get("namespace")
    return f"{held.get('job_id')}" if namespace in (None, "default") else f"{namespace}/{held.get('job_id')}"


def _used_by(gpu: Gpu, with_pods: bool) -> str:
    far = ", ".join(gpu["far_cpus"])
    return _user(gpu, with_pods) + (f"; on CPUs of another NUMA node than the GPU's ({far})" if far else "")


def _user(gpu: Gpu, with_pods: bool) -> str:
    if gpu["allocations"]:
        jobs = Counter(_job(held) for held in gpu["allocations"])
        return ", ".join(f"{number} x {job}" if number > 1 else job for job, number in jobs.items())
    computing = [process for process in gpu["processes"] or [] if computes(process, only=True)]
    if computing:
        number = count_text(len(computing), "process", "processes")
        return f"{number}, perhaps of a pod" if with_pods else f"{number}, no allocation"
    drawing = sum(1 for process in gpu["processes"] or [] if computes(process) and "G" in str(process.get("type")))
    also = f", {count_text(drawing, 'process computes and draws', 'processes compute and draw')}" if drawing else ""
    if gpu["in_nomad"] is False and not gpu["hidden"]:
        return f"not in Nomad{also}"
    return _unused(gpu, gpu["hidden"], with_pods) + also


def _unused(gpu: Gpu, hidden: bool | None, with_pods: bool) -> str:
    """What is told of that which no allocation holds."""
    if gpu["in_nomad"] is None:
        return UNKNOWN
    if hidden:
        return "hidden from Nomad"
    return "free in Nomad" if with_pods else "free"


def _gpu_view(gpu: Gpu, with_pods: bool) -> dict[str, Any]:
    return {
        "index": UNKNOWN if gpu["index"] is None else str(gpu["index"]),
        "uuid": gpu["uuid"] or "no UUID told",
        "model": gpu["model"] or "unknown model",
        "bus": gpu["pci_bus_id"] or "",
        "level": gpu["verdict"],
        "word": WORDS[gpu["verdict"]],
        "utilization": _percent_text(gpu["utilization_gpu_percent"]),
        "utilization_bar": _share(gpu["utilization_gpu_percent"], 100),
        "memory": memory_text(gpu["memory_used_mib"], gpu["memory_total_mib"]),
        "memory_bar": _share(gpu["memory_used_mib"], gpu["memory_total_mib"]),
        "power": power_text(gpu["power_draw_w"]),
        "power_bar": _share(gpu["power_draw_w"], gpu["power_limit_w"]),
        "temperature": UNKNOWN if gpu["temperature_gpu_c"] is None else f"{gpu['temperature_gpu_c']} °C",
        "used_by": _used_by(gpu, with_pods),
        "migs": [
            {
                "uuid": device["uuid"] or "no UUID told",
                "profile": device["profile"] or "MIG device",
                "used_by": _job(device["allocation"])
                if device["allocation"]
                else _unused(gpu, device["hidden"], with_pods),
            }
            for device in gpu["mig_devices"]
        ],
    }


def _nomad_text(node: Node, with_nomad: bool) -> str:
    known = node["nomad"]
    if not with_nomad:
        return "no answer"
    if not known:
        return "not in Nomad"
    words = [str(known["status"]), str(known["eligibility"])]
    words += ["draining"] if known["drain"] else []
    return ", ".join(words) + (f": {known['reason'].rstrip('.')}" if known["reason"] else "")


def _kubernetes_text(node: Node, data: Document) -> str:
    """How Kubernetes has a node; nothing where that is not to be expected."""
    known = node["kubernetes"]
    if not known:
        # What should be there and is not is a problem of the node.
        return "" if node["region"] is not None or not data["kubernetes"] else "not known"
    words = [known["status"]] + ["cordoned"] * (not known["schedulable"])
    words += ["takes work"] * (known["schedulable"] and known["status"] == "ready")
    noun = "allocatable device" if known["gpus_used"] is None else "allocatable GPU"
    words += [f"pods hold {known['devices_used']} of {count_text(known['devices_allocatable'], noun)}"]
    return ", ".join(words) + (f": {known['reason'].rstrip('.')}" if known["reason"] else "")


def _schedulers_text(node: Node, data: Document) -> str:
    found = {
        "Nomad": _nomad_text(node, node["region"] in _answered(data)) if node["region"] is not None else "",
        "Kubernetes": _kubernetes_text(node, data),
    }
    return ". ".join(f"{name}: {text}" for name, text in found.items() if text)


def _closed_text(node: Node) -> str:
    """Why no work is placed on a node, for its row; nothing for one that takes work."""
    known = node["kubernetes"]
    words = [_closed_in_nomad(node)]
    if known and known["status"] != "ready":
        words.append(f"{known['status']} in Kubernetes")
    elif known and not known["schedulable"]:
        words.append("cordoned in Kubernetes")
    return ", ".join(filter(None, words))


def _closed_in_nomad(node: Node) -> str:
    known = node["nomad"]
    if not known or (known["status"] == "ready" and known["eligibility"] == "eligible" and not known["drain"]):
        return ""
    if known["status"] != "ready":
        return f"{known['status']} in Nomad"
    return "draining" if known["drain"] else "takes no new work"


def _models_text(node: Node) -> str:
    models = Counter(gpu["model"] or "unknown model" for gpu in node["gpus"])
    return ", ".join(f"{number} x {model}" for model, number in models.items()) or "no GPU known"


def _versions_text(node: Node, data: Document) -> str:
    with_region = node["region"] is not None and len(data["nomad"]["regions"]) > 1
    words = [f"region {node['region']}"] * with_region + [node["platform"]]
    words += [f"driver {node['driver_version']}"] if node["driver_version"] else []
    words += [f"CUDA {node['cuda_version']}"] if node["cuda_version"] else []
    return ", ".join(word for word in words if word)


def _gpus_text(node: Node) -> str:
    found, expected = len(node["gpus"]), node["gpus_expected"]
    if expected is None or expected == found:
        return count_text(found, "GPU")
    return f"{found} of {count_text(expected, 'expected GPU')}"


def _answered(data: Document) -> set[str]:
    """The regions of which a server answered."""
    return {each["region"] for each in data["nomad"]["regions"] if each["server"]}


def _node_view(node: Node, number: int, data: Document) -> dict[str, Any]:
    with_nomad = node["region"] in _answered(data)
    allocatable = sum(1 for gpu in node["gpus"] if not gpu["hidden"])
    return {
        "id": f"node-{number}",
        "name": node["name"],
        "level": node["verdict"],
        "word": WORDS[node["verdict"]] if node["state"] == "answered" else STATES[node["state"]],
        "reason": node["reason"] or "",
        "models": _models_text(node),
        "versions": _versions_text(node, data),
        "count": _gpus_text(node),
        "allocated": (
            f"{count_text(node['allocated_gpus'])} of {allocatable} allocated" + " in Nomad" * node["in_kubernetes"]
            if with_nomad and allocatable
            else ""
        ),
        "utilization": _percent_text(node["utilization_percent"]),
        "utilization_bar": _share(node["utilization_percent"], 100),
        "power": power_text(node["power_draw_w"]),
        "schedulers": _schedulers_text(node, data),
        "closed": _closed_text(node),
        "age": age_text(node["asked_at"], data["made_at"]) if node["asked_at"] else "",
        "from_nomad": any(gpu["source"] == "nomad" for gpu in node["gpus"]),
    }


def _compact_lines(node: Node) -> str:
    """The GPUs of a node as text: a table for each of thousands of nodes is what a browser cannot open."""
    rows = []
    for gpu in node["gpus"]:
        view = _gpu_view(gpu, may_have_pods(node))
        state = "" if gpu["verdict"] == "ok" else f"  {view['word']}"
        rows.append(
            f"{view['index']:>2}  {view['uuid']}  {view['utilization']:>5}  {view['power']:>6}  "
            f"{view['temperature']:>6}  {view['used_by']}{state}"
        )
        rows += [f"      {mig['profile']}  {mig['uuid']}  {mig['used_by']}" for mig in view["migs"]]
    rows += [_sentence(problem) for problem in _alike(node)]
    return "\n".join(rows)


def _groups(nodes: Sequence[tuple[int, Node]], data: Document) -> list[dict[str, Any]]:
    """Nodes that are alike, sick ones first as they come."""
    alike: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    members: dict[tuple[str, ...], list[Gpu]] = defaultdict(list)
    for number, node in nodes:
        key = (node["verdict"], node["state"], _models_text(node), _versions_text(node, data))
        view = _node_view(node, number, data)
        words = [
            view["count"],
            view["utilization"],
            view["power"],
            view["allocated"],
            view["reason"],
            view["schedulers"],
        ]
        alike[key].append(
            {
                "id": view["id"],
                "name": view["name"],
                "line": ", ".join(word for word in words if word),
                "lines": _compact_lines(node),
            }
        )
        members[key] += node["gpus"]
    return [
        {
            "level": key[0],
            "word": WORDS[key[0]] if key[1] == "answered" else STATES[key[1]],
            "models": key[2],
            "versions": key[3],
            "count": count_text(len(views), "node"),
            "gpus": count_text(len(members[key]), "GPU"),
            "utilization": _percent_text(mean(gpu["utilization_gpu_percent"] for gpu in members[key])),
            "power": power_text(total(gpu["power_draw_w"] for gpu in members[key])),
            "nodes": views,
        }
        for key, views in alike.items()
    ]


def _next_step(problem: Problem) -> str:
    """What to do, for people: the action of the health check is a word for programs."""
    said = str(problem["message"] or "").rpartition("Next step: ")
    return (said[2] if said[1] else str(problem["action"] or "").replace("_", " ")).rstrip(".")


def _gpus_named(indexes: Sequence[str]) -> str:
    """The GPUs of one entry: those with a number by number, others by what they have."""
    numbers = [index for index in indexes if index.isdigit()]
    named = [f"GPU {numbers[0]}"] if len(numbers) == 1 else []
    named += [f"GPUs {', '.join(numbers)}"] if len(numbers) > 1 else []
    return ", ".join(named + [index for index in indexes if not index.isdigit()])


def _alike(node: Node) -> list[dict[str, str]]:
    """A node's problems; those that differ by nothing but the GPU are one."""
    indexes = {gpu["uuid"]: gpu["index"] for gpu in node["gpus"] if gpu["uuid"]}
    found: dict[tuple[str, ...], list[str]] = {}
    for problem in node["problems"]:
        key = (
            str(problem["severity"]),
            str(problem["code"]),
            str(problem["found"] or problem["message"] or ""),
            str(problem["expected"] or ""),
            _next_step(problem),
        )
        index = indexes.get(problem["uuid"] or "")
        name = str(problem["uuid"] or problem["pci_bus_id"] or "") if index is None else str(index)
        found.setdefault(key, []).extend([name] if name else [])
    return [
        {
            "severity": severity,
            "code": code,
            "gpu": _gpus_named(list(dict.fromkeys(names))),
            "found": text,
            "expected": expected,
            "action": action,
        }
        for (severity, code, text, expected, action), names in found.items()
    ]


def _sentence(problem: Mapping[str, str]) -> str:
    where = f", {problem['gpu']}" if problem["gpu"] else ""
    text = f"{problem['severity']}{where}: found {problem['found']}."
    text += f" Expected: {problem['expected']}." if problem["expected"] else ""
    return text + (f" Next step: {problem['action']}." if problem["action"] else "")


def _problem_groups(nodes: Sequence[Node]) -> list[dict[str, Any]]:
    """Problems by their code, so that one cause on a thousand nodes is one entry."""
    found: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    for number, node in enumerate(nodes):
        for problem in _alike(node):
            found[problem["severity"], problem["code"]].append(
                {"id": f"node-{number}", "node": node["name"], **problem}
            )
    order = {severity: place for place, severity in enumerate(VERDICTS)}
    groups = sorted(found.items(), key=lambda item: (order.get(item[0][0], 1), -len(item[1]), item[0][1]))
    return [
        {
            "level": severity if severity in VERDICTS else "unknown",
            "word": severity,
            "code": code.replace("_", " "),
            "count": count_text(len({row["id"] for row in rows}), "node"),
            "rows": rows[:PROBLEM_ROWS],
            "more": count_text(len(rows) - PROBLEM_ROWS, "more like this", "more like these")
            if len(rows) > PROBLEM_ROWS
            else "",
        }
        for (severity, code), rows in groups
    ]


def _nice_ceiling(value: float) -> float:
    """The next of 1, 2, 5 times a power of ten: what an axis ends with."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value)


def plot(points: Sequence[tuple[float, float]], ceiling: float) -> str:
    """The points of an SVG line in a box of 100 by 40, time to the right."""
    first, last = points[0][0], points[-1][0]
    width = (last - first) or 1.0
    return " ".join(
        f"{(moment - first) / width * 100:.2f},{40 - min(value, ceiling) / ceiling * 40:.2f}"
        for moment, value in points
    )


def _plots(points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for title, key, text in (
        ("Utilisation, mean of all GPUs", "utilization_percent", _percent_text),
        ("Power, all GPUs together", "power_draw_w", power_text),
    ):
        known = [point for point in points if point[key] is not None]
        if len(known) < 2:
            continue
        values = [float(point[key]) for point in known]
        ceiling = 100.0 if key == "utilization_percent" else _nice_ceiling(max(values))
        moments = [parse_time(point["made_at"]).timestamp() for point in known]
        line = plot(list(zip(moments, values, strict=True)), ceiling)
        found.append(
            {
                "title": title,
                "now": text(values[-1]),
                "top": text(ceiling),
                "middle": text(ceiling / 2),
                "bottom": text(0.0),
                "first": time_text(known[0]["made_at"])[:16],
                "last": time_text(known[-1]["made_at"])[:16],
                "line": line,
                "area": f"0,40 {line} 100,40",
                "words": f"{len(known)} reports: lowest {text(min(values))}, highest {text(max(values))}, "
                f"now {text(values[-1])}",
            }
        )
    return found


BUCKETS = (
    (0, 0, "0 %"),
    (1, 25, "1 to 25 %"),
    (26, 50, "26 to 50 %"),
    (51, 75, "51 to 75 %"),
    (76, 100, "76 to 100 %"),
)


def _distribution(nodes: Sequence[Node]) -> list[dict[str, Any]]:
    values = [gpu["utilization_gpu_percent"] for node in nodes for gpu in node["gpus"]]
    counts = [
        (label, sum(1 for value in values if value is not None and low <= value <= high))
        for low, high, label in BUCKETS
    ]
    counts.append(("not told", sum(1 for value in values if value is None)))
    return [
        {"label": label, "gpus": count_text(number, "GPU"), "bar": _share(number, len(values)) or 0}
        for label, number in counts
        if values
    ]


def _cost_view(data: Document) -> dict[str, Any]:
    cost, currency = data["cost"], data["currency"]

    def row(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "model": name,
            "gpus": count_text(entry["gpus"])
            + (f" ({entry['gpus_critical']} critical)" if entry["gpus_critical"] else ""),
            "each": _plain(entry.get("relative_throughput")),
            "throughput": _plain(entry["throughput"]),
            "price": _money(entry.get("price_per_hour"), currency),
            "cost": _money(entry["cost_per_hour"], currency),
            "gain": _plain(entry["return"], 3),
            "allocated": (
                f"{count_text(entry['allocated_gpus'])} of {count_text(entry['allocatable_gpus'])}"
                if entry["allocated_gpus"] is not None
                else UNKNOWN
            ),
            "utilized": (
                f"{count_text(entry['utilized_gpus'])} of {count_text(entry['utilization_gpus'])}"
                if entry["utilized_gpus"] is not None
                else UNKNOWN
            ),
            "idle": _money(entry["idle_cost_per_hour"], currency),
            "unused": _money(entry["unused_cost_per_hour"], currency),
            "gain_allocated": _plain(entry["return_allocated"], 3),
            "gain_utilized": _plain(entry["return_utilized"], 3),
        }

    return {
        "rows": [row(entry["model"], entry) for entry in cost["models"] if entry["model"] not in cost["unpriced"]],
        "total": row("All priced models", cost["total"]) if cost["total"] else None,
        "unpriced": [
            {"model": entry["model"], "gpus": count_text(entry["gpus"], "GPU")}
            for entry in cost["models"]
            if entry["model"] in cost["unpriced"]
        ],
        "unmatched": cost["unmatched"],
        "productivity": _plain(data["productivity"]),
        "currency": currency,
    }


def _users_view(data: Document) -> dict[str, Any]:
    namespaces, jobs, outside = data["users"]["namespaces"], data["users"]["jobs"], data["users"]["outside"]

    pods = data["users"]["pods"]

    def placed(use: NamespaceUse | JobUse) -> str:
        return f"{use['region']}, " * (len(data["nomad"]["regions"]) > 1) + use["namespace"]

    return {
        # Without a budget the jobs tell it all.
        "namespaces": [
            {
                "namespace": placed(use),
                "gpus": count_text(use["gpus"]),
                "budget": UNKNOWN if use["budget"] is None else count_text(use["budget"]),
                "over": None if use["budget"] is None else is_over(use),
            }
            for use in namespaces[:TABLE_ROWS]
        ]
        if any(use["budget"] is not None for use in namespaces)
        else [],
        "more_namespaces": count_text(len(namespaces) - TABLE_ROWS, "more namespace")
        if len(namespaces) > TABLE_ROWS
        else "",
        "jobs": [
            {
                "job": job["job_id"],
                "namespace": placed(job),
                "gpus": count_text(job["gpus"]),
                "models": _names(job["models"]),
                "nodes": _names(job["nodes"], 4),
                "utilization": _percent_text(job["utilization_percent"]),
                "utilization_bar": _share(job["utilization_percent"], 100),
                "power": power_text(job["power_draw_w"]),
            }
            for job in jobs[:TABLE_ROWS]
        ],
        "more_jobs": count_text(len(jobs) - TABLE_ROWS, "more job") if len(jobs) > TABLE_ROWS else "",
        "outside": [
            {
                "program": entry["program"],
                "gpus": count_text(entry["gpus"], "GPU"),
                "memory": memory_text(None, entry["memory_used_mib"]).removeprefix("of "),
                "nodes": _names(entry["nodes"], 4),
            }
            for entry in outside[:TABLE_ROWS]
        ],
        "nomad": bool(data["nomad"]["regions"]),
        "answered": data["nomad"]["answered"],
        "kubernetes": bool(data["kubernetes"]),
        "kubernetes_answered": bool(data["kubernetes"] and data["kubernetes"]["answered"]),
        "pods": [
            {
                "pod": use["pod"],
                "namespace": use["namespace"],
                "gpus": count_text(use["gpus"]),
                "node": use["node"],
                "phase": use["phase"],
            }
            for use in pods[:TABLE_ROWS]
        ],
        "more_pods": count_text(len(pods) - TABLE_ROWS, "more pod") if len(pods) > TABLE_ROWS else "",
    }


def _drift_view(data: Document) -> list[dict[str, Any]]:
    return [
        {
            "model": group["model"],
            "platform": group["platform"],
            "size": f"{count_text(group['gpus'], 'GPU')} on {count_text(group['nodes'], 'node')}",
            "agrees": all(field["agrees"] for field in group["fields"]),
            "fields": [
                {
                    "name": FIELDS[field["field"]],
                    "agrees": field["agrees"],
                    "majority": field["majority"] or "not told",
                    "majority_gpus": count_text(field["values"][0]["gpus"], "GPU") if field["values"] else "",
                    "others": [
                        {
                            "value": other["value"],
                            "gpus": count_text(other["gpus"], "GPU"),
                            "nodes": _names(other["nodes"]),
                        }
                        for other in field["values"][1:NAMES]
                    ],
                    "unknown": (
                        f"{count_text(field['unknown_gpus'], 'GPU')} did not tell"
                        if field["unknown_gpus"] and field["values"]
                        else ""
                    ),
                }
                for field in group["fields"]
                if field["field"] != "nomad_driver_version" or data["nomad"]["regions"]
            ],
        }
        for group in data["drift"]
    ]


def _mig_view(data: Document) -> dict[str, Any]:
    gpus = data["mig"]["gpus"]
    return {
        "gpus": [
            {
                "node": gpu["node"],
                "gpu": UNKNOWN if gpu["index"] is None else f"GPU {gpu['index']}",
                "model": gpu["model"] or "unknown model",
                "mode": gpu["mode"] or "not told",
                "pending": gpu["pending"] or "",
                "devices": ", ".join(
                    f"{number} x {profile}"
                    for profile, number in Counter(
                        device["profile"] or "profile not told" for device in gpu["devices"]
                    ).items()
                )
                or "none",
                "allocated": (
                    f"{sum(1 for device in gpu['devices'] if device['allocation'])} of "
                    f"{sum(1 for device in gpu['devices'] if not device['hidden'])}"
                    if data["nomad"]["answered"] and not data["kubernetes"]
                    else UNKNOWN
                ),
            }
            for gpu in gpus[:TABLE_ROWS]
        ],
        "more": count_text(len(gpus) - TABLE_ROWS, "more GPU") if len(gpus) > TABLE_ROWS else "",
        "profiles": [
            {
                "model": entry["model"],
                "profile": entry["profile"],
                "devices": count_text(entry["devices"]),
                "allocated": count_text(entry["allocated"]),
            }
            for entry in data["mig"]["profiles"]
        ],
    }


def _ages_text(ages: Sequence[datetime.datetime], made_at: str) -> str:
    if not ages:
        return ""
    newest, oldest = (age_text(moment.isoformat(), made_at) for moment in (max(ages), min(ages)))
    return newest if newest == oldest else f"between {newest} and {oldest}"


def _nomad_of(regions: Sequence[str], data: Document) -> str:
    return "Nomad" if len(data["nomad"]["regions"]) == 1 else f"Nomad in {' and '.join(regions)}"


def _headline(data: Document) -> dict[str, str]:
    """The farm in one sentence, and how bad it is."""
    summary = data["summary"]
    gpus, nodes = summary["verdicts"], summary["node_verdicts"]
    parts = []
    level = "ok"
    if nodes["critical"] or gpus["critical"]:
        sick = count_text(gpus["critical"], "GPU") if gpus["critical"] else count_text(nodes["critical"], "node")
        parts.append(f"{sick} critical")
        level = "critical"
    if nodes["warning"]:
        parts.append(f"{count_text(nodes['warning'], 'node')} with a warning")
        level = "warning" if level == "ok" else level
    if summary["nodes_unanswered"]:
        parts.append(f"{count_text(summary['nodes_unanswered'], 'node')} without an answer")
        level = "unknown" if level == "ok" else level
    silent = [each["region"] for each in data["nomad"]["regions"] if not each["server"]]
    if silent:
        parts.append(f"{_nomad_of(silent, data)} without an answer")
        level = "unknown" if level == "ok" else level
    if data["kubernetes"] and not data["kubernetes"]["answered"]:
        parts.append("Kubernetes without an answer")
        level = "unknown" if level == "ok" else level
    over = sum(map(is_over, data["users"]["namespaces"]))
    if over:
        parts.append(f"{count_text(over, 'namespace')} over budget")
        level = "warning" if level == "ok" else level
    if not summary["gpus"]:
        parts.insert(0, "No GPU known")
        level = "unknown" if level == "ok" else level
    if not parts:
        everything = count_text(summary["gpus"], "GPU")
        text = f"All {everything} healthy" if summary["gpus"] != 1 else "The one GPU is healthy"
        return {"level": "ok", "text": text}
    return {"level": level, "text": ", ".join(parts)}


def _allocated(data: Document) -> tuple[float | None, str]:
    """How many GPUs jobs and pods hold, and what that is of."""
    summary = data["summary"]
    held = {
        "Nomad": summary["allocated_gpus"] if data["nomad"]["regions"] else 0.0,
        "Kubernetes": summary["pod_gpus"] if data["kubernetes"] else 0.0,
    }
    answered = {
        "Nomad": data["nomad"]["answered"],
        "Kubernetes": bool(data["kubernetes"] and data["kubernetes"]["answered"]),
    }
    silent = [name for name, number in held.items() if number is None and not answered[name]]
    if silent:
        return None, f"{' and '.join(silent)} gave no answer"
    if held["Kubernetes"] is None:
        return None, "pods hold MIG devices or shared GPUs"
    by_pods = f", {count_text(held['Kubernetes'])} by pods" if data["kubernetes"] and data["nomad"]["regions"] else ""
    hidden = summary["gpus"] - summary["allocatable_gpus"]
    note = f"of {count_text(summary['allocatable_gpus'], 'GPU')}{by_pods}"
    note += f", {hidden:,} hidden from Nomad" if hidden else ""
    return sum(number or 0 for number in held.values()), note


def _tiles(data: Document) -> list[dict[str, Any]]:
    summary, currency, money = data["summary"], data["currency"], data["cost"]["total"]
    verdicts = summary["verdicts"]
    others = [f"{verdicts[verdict]:,} {WORDS[verdict]}" for verdict in VERDICTS if verdicts[verdict]]
    expected = summary["gpus_expected"]
    if expected is not None and summary["gpus_expected_nodes"] == summary["nodes"] and expected != summary["gpus"]:
        others.insert(0, f"{expected:,} expected")
    told = f"{summary['utilization_gpus']:,} of {count_text(summary['gpus'], 'GPU')} told it"
    allocated, note = _allocated(data)
    tiles: list[dict[str, Any]] = [
        {"label": "GPUs", "value": count_text(summary["gpus"]), "note": ", ".join(others), "bar": None},
        {
            "label": "Nodes",
            "value": count_text(summary["nodes"]),
            "note": "all answered"
            if not summary["nodes_unanswered"]
            else f"{summary['nodes_unanswered']:,} without an answer",
            "bar": None,
        },
        {
            "label": "Allocated",
            "value": count_text(allocated),
            "note": note,
            "bar": _share(allocated, summary["allocatable_gpus"]),
        },
        {
            "label": "Utilisation",
            "value": _percent_text(summary["utilization_percent"]),
            "note": told,
            "bar": _share(summary["utilization_percent"], 100),
        },
        {
            "label": "Power",
            "value": power_text(summary["power_draw_w"]),
            "note": f"{summary['power_gpus']:,} of {count_text(summary['gpus'], 'GPU')} told it",
            "bar": None,
        },
    ]
    if money:
        tiles.append(
            {
                "label": "Idle money",
                "value": _money(money["idle_cost_per_hour"], currency),
                "note": f"an hour, of {_money(money['cost_per_hour'], currency)}",
                "bar": _share(money["idle_cost_per_hour"], money["cost_per_hour"]),
            }
        )
    return tiles


def _rate(value: float | None, unit: str) -> str:
    return UNKNOWN if value is None else f"{value:,.0f} {unit}"


def _figures(figures: Mapping[str, float | None]) -> dict[str, str]:
    tensor = [figures.get(f"{kind}_tensor_tflop_per_s") for kind in ("fp16", "bf16")]
    return {
        "memory": _rate(figures.get("memory_read_gb_per_s"), "GB/s"),
        "fp32": _rate(figures.get("fp32_tflop_per_s"), "TFLOP/s"),
        "tensor": _rate(max((rate for rate in tensor if rate is not None), default=None), "TFLOP/s"),
        "nvlink": _rate(figures.get("peer_gb_per_s"), "GB/s"),
    }


def _before_text(benchmark: Benchmark) -> str:
    """What the same GPU did at earlier acceptances."""
    known = [rate for each in benchmark["before"] if (rate := each["figures"].get("memory_read_gb_per_s")) is not None]
    times = count_text(len(benchmark["before"]), "time", "times")
    if not known:
        return times if benchmark["before"] else UNKNOWN
    lowest, highest = f"{min(known):,.0f}", f"{max(known):,.0f}"
    return f"{times}, memory {lowest if lowest == highest else f'{lowest} to {highest}'} GB/s"


def _accepted(benchmark: Benchmark) -> tuple[str, str]:
    """The level and the word: a GPU may do what it should on a node that stays closed."""
    if benchmark["verdict"] != "ok":
        return "critical", "failed"
    return ("ok", "accepted") if benchmark["accepted"] else ("warning", "passed, node not accepted")


def _benchmarks_view(nodes: Sequence[Node], unread: str | None) -> dict[str, Any]:
    """GPUs and MIG devices at their newest acceptance, outliers first, and what there is to say of others."""
    rows = []
    for number, node in enumerate(nodes):
        for gpu in node["gpus"]:
            place = UNKNOWN if gpu["index"] is None else str(gpu["index"])
            for name, model, found in (
                (place, gpu["model"], gpu["benchmark"]),
                *((f"{place} {mig['profile'] or 'MIG'}", gpu["model"], mig["benchmark"]) for mig in gpu["mig_devices"]),
            ):
                if found is None:
                    continue
                level, word = _accepted(found)
                rows.append(
                    {
                        "id": f"node-{number}",
                        "node": node["name"],
                        "gpu": name,
                        "model": model or "unknown model",
                        "date": time_text(found["date"])[:16],
                        "level": level,
                        "word": word,
                        "outliers": "; ".join(f"{each['code']}: {each['found']}" for each in found["outliers"]),
                        "before": _before_text(found),
                        **_figures(found["figures"]),
                    }
                )
    rows.sort(key=lambda row: ("critical", "warning", "ok").index(row["level"]))
    more = len(rows) - TABLE_ROWS
    others = "" if rows else "No acceptance of these GPUs is known."
    if unread:
        unknown = "which GPU has a newer acceptance or another one" if rows else "whether these GPUs were accepted"
        others = f"Nobody knows {unknown}: {unread}."
    return {
        "rows": rows[:TABLE_ROWS],
        "more": count_text(more, "more GPU") if more > 0 else "",
        "others": others,
    }


def page(data: Document) -> dict[str, Any]:
    """The document as the texts of the page. Nothing is escaped here: that is the template's part."""
    nodes = data["nodes"]
    numbered = list(enumerate(nodes))
    detailed = []
    for number, node in numbered[:DETAILED_NODES]:
        sick = node["verdict"] != "ok"
        detailed.append(
            {
                **_node_view(node, number, data),
                "open": (sick and number < OPEN_NODES) or len(nodes) <= OPEN_NODES,
                "gpus": [_gpu_view(gpu, may_have_pods(node)) for gpu in node["gpus"]],
                "problems": [_sentence(problem) for problem in _alike(node)],
            }
        )
    ages = [parse_time(node["asked_at"]) for node in nodes if node["asked_at"] and node["state"] == "answered"]
    unanswered = [
        {"name": node["name"], "id": f"node-{number}", "state": STATES[node["state"]], "reason": node["reason"]}
        for number, node in numbered
        if node["state"] != "answered"
    ]
    return {
        "title": data["title"],
        "made_at": time_text(data["made_at"]),
        "headline": _headline(data),
        "tiles": _tiles(data),
        "notices": data["notices"],
        "unanswered": unanswered[:TABLE_ROWS],
        "more_unanswered": count_text(len(unanswered) - TABLE_ROWS, "more node")
        if len(unanswered) > TABLE_ROWS
        else "",
        "problems": _problem_groups(nodes),
        "plots": _plots(data["history"]["points"]),
        "distribution": _distribution(nodes),
        "users": _users_view(data),
        "cost": _cost_view(data),
        "drift": _drift_view(data),
        "mig": _mig_view(data),
        "benchmarks": _benchmarks_view(nodes, data["acceptances"]["unread"]),
        "nodes": detailed,
        "groups": _groups(numbered[DETAILED_NODES:], data),
        "ages": _ages_text(ages, data["made_at"]),
        "schedulers": " and ".join(
            name for name, there in (("Nomad", data["nomad"]["regions"]), ("Kubernetes", data["kubernetes"])) if there
        ),
        "nomad": ", ".join(
            f"{each['server']}, asked {age_text(each['asked_at'], data['made_at'])} before"
            for each in data["nomad"]["regions"]
            if each["server"]
        ),
    }

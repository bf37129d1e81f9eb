# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The answers of a farm as one document."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

from ansible_collections.gpufarm.core.plugins.module_utils.gpu_verdicts import Expected
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes import extra_gpu_nodes
from ansible_collections.gpufarm.core.plugins.module_utils.text import first_of
from ansible_collections.gpufarm.core.plugins.plugin_utils.report.benchmarks import add_benchmarks
from ansible_collections.gpufarm.core.plugins.plugin_utils.report.cost import cost_of, read_prices
from ansible_collections.gpufarm.core.plugins.plugin_utils.report.figures import drift_of, mig_of, summary_of
from ansible_collections.gpufarm.core.plugins.plugin_utils.report.history import (
    HISTORY_LINES,
    extend_history,
    history_line,
    points_of,
    read_history,
)
from ansible_collections.gpufarm.core.plugins.plugin_utils.report.nodes import (
    REGION,
    Cluster,
    NomadView,
    cluster_of,
    nodes_of,
    nomad_views,
)
from ansible_collections.gpufarm.core.plugins.plugin_utils.report.records import (
    SCHEMA,
    AgentCertificate,
    Document,
    NomadRegion,
    Notice,
    notice,
)
from ansible_collections.gpufarm.core.plugins.plugin_utils.report.sums import natural_key, number_of, one_line
from ansible_collections.gpufarm.core.plugins.plugin_utils.report.users import users_of

# Hosts that one notice names.
NAMED = 5


@dataclasses.dataclass(frozen=True)
class Options:
    """What the user asked for."""

    title: str = "GPU farm"
    currency: str = "EUR"
    productivity: float = 1.0
    models: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    history_path: str | None = None
    accepted_path: str | None = None


def build(
    hosts: Sequence[str],
    answers: Sequence[Mapping[str, Any]],
    servers: Sequence[Mapping[str, Any]],
    options: Options,
    *,
    made_at: str,
    history: str = "",
    regions: Mapping[str, str] | None = None,
    kubernetes: Mapping[str, Any] | None = None,
    accepted: str = "",
    accepted_failure: str = "",
    certificates: Mapping[str, Any] | None = None,
) -> tuple[Document, str | None]:
    """The document, and the new text of the history; None where the present one must not be written over.

    C(answers) has for each host C(name), C(nomad_name), C(asked_at), C(gpus_expected) and C(health), the registered
    result of nvidia_gpu_health, and may have C(ignored), the UUIDs that its device plugin hides. C(servers) has for
    each Nomad server that was asked C(server), C(asked_at), and C(result), the registered result of nomad_gpu_info.
    Where Nomad has several regions its C(region) is there, too, and C(regions) has that of each host. C(kubernetes),
    where the inventory has nodes of it, has C(host), who asked the cluster, C(hosts), its nodes in the inventory,
    C(asked_at), and C(result), the registered result of kubernetes_gpu_info; answers of its nodes have
    C(kubernetes_name). Those without a region are in Kubernetes alone.
    C(accepted) is the text of the file of acceptances, and C(accepted_failure) why it could not be read.
    C(certificates) has by host what nomad_agent_info tells of those of its agent.
    """
    views, failures = nomad_views(servers)
    nomad_names = {str(answer["name"]): str(answer.get("nomad_name") or answer["name"]) for answer in answers}
    cluster = cluster_of(kubernetes)
    alone = (cluster.hosts if cluster else frozenset()) - set(regions or {})
    listed = {node["name"]: region for region, view in views.items() for node in view.nodes}
    placed: dict[str, str | None] = {host: (regions or {}).get(host) or REGION for host in hosts}
    # A host that Nomad knows all the same is in both.
    placed |= {host: listed.get(nomad_names.get(host, host)) for host in hosts if host in alone}
    named = {region for region in placed.values() if region is not None}
    known = sorted({*named, *views, *(entry["region"] for entry in failures)} or (set() if alone else {REGION}))
    # With a region that is silent nobody knows what is allocated in the whole farm.
    answered = bool(known) and all(region in views for region in known)
    nodes = nodes_of(placed, answers, views, cluster)
    acceptances, unread = add_benchmarks(nodes, accepted, accepted_failure, options.accepted_path)
    users = users_of(nodes, views, cluster)
    # Nobody knows which GPUs a pod holds, nor so what those of a model cost that nobody does.
    by_gpu = answered and cluster is None
    prices, notices = read_prices(options.models)
    productivity = number_of(options.productivity)
    if productivity is None:
        notices.append(
            notice(f"report_productivity is {one_line(options.productivity)!r}; 1 was taken", "a number from 0 on")
        )
        productivity = 1.0
    ends = _first_ends(certificates or {})
    lines, damaged = read_history(history, options.history_path)
    data: Document = {
        "schema": SCHEMA,
        "title": options.title,
        "made_at": made_at,
        "currency": options.currency,
        "productivity": productivity,
        "summary": summary_of(nodes, answered, bool(cluster and cluster.nodes is not None)),
        "nomad": {
            "answered": answered,
            "regions": [_region(region, views.get(region)) for region in known],
            "failures": failures,
            "certificates": ends,
        },
        "kubernetes": None
        if cluster is None
        else {"answered": cluster.nodes is not None, "host": cluster.host, "asked_at": cluster.asked_at},
        "notices": _nomad_notices([region for region in known if region not in views], failures)
        + _certificate_notices(ends)
        + _kubernetes_notices(cluster, answers)
        + notices
        + acceptances
        + ([unread] if unread else [])
        + ([damaged] if damaged else []),
        "nodes": nodes,
        "drift": drift_of(nodes),
        "mig": mig_of(nodes, by_gpu),
        "users": users,
        "cost": cost_of(nodes, prices, productivity, by_gpu),
        "acceptances": {"path": options.accepted_path, "unread": unread["found"] if unread else None},
        "history": {"path": options.history_path, "points": []},
    }
    line = history_line(data)
    data["history"]["points"] = points_of([*lines[-HISTORY_LINES + 1 :], line])
    return data, None if damaged else extend_history(lines, line)


def _region(region: str, view: NomadView | None) -> NomadRegion:
    return {
        "region": region,
        "server": view.server if view else None,
        "asked_at": view.asked_at if view else None,
    }


def _first_ends(certificates: Mapping[str, Any]) -> list[AgentCertificate]:
    keys = ("path", "not_after", "days_left", "state")
    first = [(host, min(each, key=lambda one: one["not_after"])) for host, each in certificates.items() if each]
    ends = [cast(AgentCertificate, {"host": host, **{key: one[key] for key in keys}}) for host, one in first]
    return sorted(ends, key=lambda one: (one["not_after"], natural_key(one["host"])))


def _certificate_notices(ends: Sequence[AgentCertificate]) -> list[Notice]:
    notices = []
    for state, what in (("expired", "have expired"), ("ends_soon", "expire soon")):
        found = [one for one in ends if one["state"] == state]
        if found:
            named = first_of([f"{one['host']} ({one['not_after'][:10]})" for one in found], NAMED)
            notices.append(
                notice(
                    f"Certificates of Nomad {what} on {named}",
                    "agents with certificates that hold",
                    "run playbooks/site.yml, which renews them where nomad_tls is generate; playbooks/verify.yml says "
                    "of each host which one it is",
                )
            )
    return notices


def _kubernetes_notices(cluster: Cluster | None, answers: Sequence[Mapping[str, Any]]) -> list[Notice]:
    if cluster is None:
        return []
    if cluster.nodes is None:
        return [
            _failed(f"Kubernetes could not be asked on {cluster.host}", str(cluster.failure), "an answer of its API",
                    "run playbooks/kubernetes_verify.yml")
        ]  # fmt: skip
    hosts = [Expected(str(answer.get("kubernetes_name"))) for answer in answers]
    others = extra_gpu_nodes(hosts, cluster.nodes)
    if not others:
        return []
    return [
        notice(
            f"Kubernetes has GPUs on {', '.join(others)}",
            "nodes with GPUs that are hosts of the group kubernetes_nodes, are part of this run and told their names",
            "add them to the inventory, make the report without --limit, or set kubernetes_node_name of a silent host",
        )
    ]


def _failed(what: str, reason: str, wanted: str, step: str) -> Notice:
    """A failure as a notice: the modules' own errors say what to do, others, such as Ansible's, only what happened."""
    found, _word, rest = reason.partition(" Expected: ")
    expected, _word, action = rest.partition(" Next step: ")
    return notice(f"{what}: {found.rstrip('.')}", expected.rstrip(".") or wanted, action.rstrip(".") or step)


def _nomad_notices(silent: Sequence[str], failures: list[dict[str, str]]) -> list[Notice]:
    notices = [
        _failed(f"Nomad could not be asked on {failure['server']}", failure["reason"],
                "an answer from each server that was asked",
                "run playbooks/verify.yml and read 'journalctl -u nomad' on that server")
        for failure in failures
    ]  # fmt: skip
    asked = {entry["region"] for entry in failures}
    for region in silent:
        if region in asked:
            continue
        notices.append(
            notice(
                "No Nomad server was asked" + (f" in region {region}" if region != REGION else ""),
                "a host in the group nomad_servers that is part of this run",
                "add the servers to the inventory, or make the report without --limit",
            )
        )
    return notices

# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: farm_report
short_description: Put together what a farm's nodes and schedulers say about its GPUs
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Makes one document of the results of M(gpufarm.core.nvidia_gpu_health) on each host, of
    M(gpufarm.core.nomad_gpu_info) and of M(gpufarm.core.kubernetes_gpu_info), the texts of a page about it, and one
    more line of a history.
  - It never fails because of a host or of a scheduler. Who gave no answer is in the document with the reason.
  - The playbook C(gpufarm.core.report) uses it. C(plugins/plugin_utils/report/records.py) has every key of the
    document with its unit.
options:
  _input:
    description:
      - One entry for each host that was asked, with C(name), C(nomad_name), C(asked_at) (ISO 8601), C(gpus_expected)
        (number or V(null)) and C(health), the registered result of M(gpufarm.core.nvidia_gpu_health). A node of
        Kubernetes has C(kubernetes_name) as well, its name there.
      - C(ignored), if it is there, has the UUIDs that the device plugin hides, as its C(ignored_gpu_ids) has them.
        Nomad is not to have these, so they are neither missing nor idle.
    type: list
    elements: dict
    required: true
  hosts:
    description:
      - Names of all hosts that belong into the report. One without an entry is reported as not asked.
    type: list
    elements: str
    required: true
  made_at:
    description:
      - Time of the report, ISO 8601.
    type: str
    required: true
  servers:
    description:
      - One entry for each Nomad server that was asked, with C(server), C(region) (C(global) if not given), C(asked_at),
        and C(result), the registered result of M(gpufarm.core.nomad_gpu_info). Of each region the first one with nodes
        counts.
    type: list
    elements: dict
    default: []
  regions:
    description:
      - Nomad's region of each host. One that is not named is in C(global), or in Kubernetes alone.
    type: dict
    default: {}
  kubernetes:
    description:
      - What was asked of Kubernetes, where there are nodes of it, with C(hosts), those in the inventory, C(host), who
        asked, C(asked_at), and C(result), the registered result of M(gpufarm.core.kubernetes_gpu_info).
    type: dict
  certificates:
    description:
      - By host, RV(gpufarm.core.nomad_agent_info#module:certificates) of its agent.
    type: dict
    default: {}
  models:
    description:
      - Names of GPU models as C(nvidia-smi) writes them, each with C(relative_throughput) and C(price_per_hour).
      - A number that cannot be used is told in the document and taken as not given.
    type: dict
    default: {}
  productivity:
    description:
      - Factor by which throughput is worth more or less to the people who use it.
    type: float
    default: 1.0
  currency:
    description:
      - Name of the currency of the prices.
    type: str
    default: EUR
  title:
    description:
      - Title of the page.
    type: str
    default: GPU farm
  history:
    description:
      - Text of the history so far.
    type: str
    default: ""
  history_path:
    description:
      - Where the history is, for messages.
    type: str
  accepted:
    description:
      - Text of the file of acceptances that M(gpufarm.core.nvidia_gpu_acceptance) keeps. Each GPU gets its newest one.
    type: str
    default: ""
  accepted_failure:
    description:
      - Why that file could not be read, where it is there.
    type: str
    default: ""
  accepted_path:
    description:
      - Where that file is, for messages.
    type: str
"""

EXAMPLES = r"""
- name: Know how many GPUs have a problem
  ansible.builtin.debug:
    msg: "{{ (report.json | from_json).summary.verdicts }}"
  vars:
    report: >-
      {{ [{'name': 'gpu01', 'asked_at': '2026-01-01T12:00:00Z', 'health': health}]
      | gpufarm.core.farm_report(hosts=['gpu01'], made_at='2026-01-01T12:00:05Z') }}
"""

RETURN = r"""
_value:
  description: The report.
  type: dict
  contains:
    json:
      description: The document as JSON text.
      type: str
      sample: '{"schema": 1, "title": "GPU farm"}'
    page:
      description: What the page shows, as texts that are not escaped.
      type: dict
      sample: {"title": "GPU farm", "made_at": "2026-01-01 12:00:05 UTC"}
    history:
      description: Text of the history with this report's line; V(null) where O(history) is not one of a report's.
      type: str
      sample: '{"made_at": "2026-01-01T12:00:05Z", "gpus": 8}'
"""

import contextlib
import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.gpufarm.core.plugins.module_utils.text import clean

INDENTED_GPUS = 500
# What nvidia-smi tells of a GPU beside what the report shows; most of a farm's answers.
UNREAD = frozenset({"clocks", "ecc", "fabric_health", "nvlinks", "pcie", "temperature_limits"})
NUMBERS = frozenset({int, float, bool, type(None)})


class Texts(dict[str, str]):
    """By a text of Ansible's, the plain one. The same few names and models come again with each GPU."""

    def __missing__(self, value: str) -> str:
        text = str(value)
        made = self[value] = text if text.isprintable() else "\n".join(map(clean, text.splitlines()))
        return made


def plain(value: Any, texts: Texts | None = None, unread: frozenset[str] = frozenset()) -> Any:
    """Ansible's containers template themselves at each access; thousands of GPUs are read faster from plain ones.

    Text loses what steers, save the ends of lines, by which a failure's last words are found.
    """
    texts = Texts() if texts is None else texts
    # A number or a text in a mapping costs no call of its own: a farm's answers have millions of them.
    if (kind := type(value)) is dict or isinstance(value, Mapping):
        return {
            texts[key]: inner
            if (kind := type(inner)) in NUMBERS
            else texts[inner]
            if kind is str
            else plain(inner, texts, unread)
            for key, inner in value.items()
            if key not in unread
        }
    if isinstance(value, str):
        return texts[value]
    if kind is list or (isinstance(value, Sequence) and not isinstance(value, bytes)):
        return [plain(inner, texts, unread) for inner in value]
    return value


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Nothing here refers to itself, and to look for what does takes a third of the time of thousands of GPUs."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@uncollected()
def farm_report(
    answers: Sequence[Mapping[str, Any]],
    hosts: Sequence[str],
    made_at: str,
    *,
    servers: Sequence[Mapping[str, Any]] = (),
    regions: Mapping[str, str] | None = None,
    kubernetes: Mapping[str, Any] | None = None,
    certificates: Mapping[str, Any] | None = None,
    models: Any = None,
    productivity: float = 1.0,
    currency: str = "EUR",
    title: str = "GPU farm",
    history: str = "",
    history_path: str | None = None,
    accepted: str = "",
    accepted_failure: str = "",
    accepted_path: str | None = None,
) -> dict[str, Any]:
    """The document as text, the page's texts and the history's new text."""
    # Not where the filter is loaded: design.md.
    from ansible_collections.gpufarm.core.plugins.plugin_utils import report, report_page

    try:
        report.parse_time(made_at)
    except (TypeError, ValueError) as error:
        raise AnsibleFilterError(
            f"farm_report: made_at is {made_at!r}. Expected: a time in ISO 8601. Next step: correct the argument."
        ) from error
    options = report.Options(
        title=plain(title),
        currency=plain(currency),
        productivity=plain(productivity),
        models={} if models is None else plain(models),
        history_path=plain(history_path),
        accepted_path=plain(accepted_path),
    )
    data, text = report.build(
        plain(hosts),
        plain(answers, unread=UNREAD),
        plain(servers),
        options,
        made_at=str(made_at),
        history=str(history or ""),
        regions=plain(regions or {}),
        kubernetes=plain(kubernetes or {}),
        accepted=str(accepted or ""),
        accepted_failure=plain(accepted_failure or ""),
        certificates=plain(certificates or {}),
    )
    # What nobody reads by eye any more need not have the size of its indentation.
    indent = 1 if data["summary"]["gpus"] <= INDENTED_GPUS else None
    return {
        "json": json.dumps(data, indent=indent, ensure_ascii=False) + "\n",
        "page": report_page.page(data),
        "history": text,
    }


class FilterModule:
    """How Ansible finds the filter."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"farm_report": farm_report}

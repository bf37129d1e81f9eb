# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The page of playbooks/report.yml: its template with generated farms, and the playbook itself."""

from __future__ import annotations

import itertools
import json
import re
import ssl
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jinja2
import pytest
from ansible_collections.gpufarm.core.plugins.plugin_utils import report_page
from ansible_collections.gpufarm.core.tests.unit.playbooks import playbook_helper
from ansible_collections.gpufarm.core.tests.unit.playbooks.playbook_helper import LOCAL
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import kubernetes_helper, nomad_helper
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper
from ansible_collections.gpufarm.core.tests.unit.plugins.plugin_utils import report_helper as helper
from jinja2 import nodes as jinja_nodes

VOID = {"meta", "br", "link", "img", "input", "hr"}
HOSTILE = "<script src=//evil.example>alert(1)</script>\"'><img onerror=x>&amp;{{ 7 * 7 }}"


class Page(HTMLParser):
    """Reads a page strictly: what is opened is closed, in the right order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.text = text
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.ids: list[str] = []
        self.headings: list[int] = []
        self.header_cells: list[dict[str, str | None]] = []
        self.words: list[str] = []
        self.by_node: dict[str, list[str]] = {}
        self._nodes: list[tuple[int, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        assert len(found) == len(attrs), (tag, attrs)
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if "id" in found:
            self.ids.append(found["id"] or "")
        if re.fullmatch(r"h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag == "th":
            self.header_cells.append(found)
        if tag not in VOID:
            self.open.append(tag)
            if tag == "details" and "node" in (found.get("class") or "").split():
                self._nodes.append((len(self.open), found["id"] or ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, (tag, self.open, self.getpos())
        if self._nodes and self._nodes[-1][0] == len(self.open):
            self._nodes.pop()
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)
            if self._nodes:
                self.by_node.setdefault(self._nodes[-1][1], []).append(data)

    @property
    def shown(self) -> str:
        return "".join(self.words)


def assert_page(text: str) -> Page:
    """The page is whole, needs nothing from elsewhere and can be read by everybody."""
    page = Page(text)
    assert text.lstrip().lower().startswith("<!doctype html>")
    for tag in ("html", "head", "body", "main", "h1", "title", "style"):
        assert page.tags[tag] == 1, tag
    assert not set(page.tags) & {"script", "link", "iframe", "object", "embed", "img", "base", "form", "audio", "video"}
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), (tag, name)
        assert name not in ("src", "srcset", "action", "data", "background", "poster", "xlink:href"), (tag, name)
        if name == "href":
            assert tag == "a" and value.startswith("#") and value[1:] in page.ids, value
        if name == "style":
            assert re.fullmatch(r"width:(100|[0-9]{1,2})%", value), value
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style and "@import" not in style and "http" not in style
    assert [name for name, number in Counter(page.ids).items() if number > 1] == []
    assert page.headings[0] == 1
    assert all(later - former <= 1 for former, later in itertools.pairwise(page.headings))
    assert all(cell.get("scope") in ("col", "row") for cell in page.header_cells)
    assert ("meta", "name", "viewport") in page.attributes and ("html", "lang", "en") in page.attributes
    return page


def assert_every_gpu_is_at_its_node(page: Page, data: dict[str, Any]) -> None:
    assert len(page.by_node) == len(data["nodes"])
    everything = page.shown
    for number, node in enumerate(data["nodes"]):
        own = "".join(page.by_node[f"node-{number}"])
        assert node["name"] in own
        # Also in the text of a problem, where one names it; as a GPU only once.
        told = "\n".join(f"{problem['found']} {problem['expected']}" for problem in node["problems"])
        for gpu in node["gpus"]:
            uuids = [gpu["uuid"], *(device["uuid"] for device in gpu["mig_devices"])]
            for uuid in uuids:
                assert own.count(uuid) == 1 + told.count(uuid), (node["name"], uuid)
    found = Counter(re.findall(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", everything))
    wanted = {gpu["uuid"] for node in data["nodes"] for gpu in node["gpus"] if gpu["uuid"]}
    assert set(found) == wanted


@pytest.mark.parametrize(
    ("nodes", "gpus", "sick"), [(1, 1, 0), (1, 1, 1), (13, 1, 2), (250, 8, 3), (250, 8, 100)], ids=str
)
def test_page_of_a_farm(nodes: int, gpus: int, sick: int) -> None:
    data = helper.document(helper.farm(nodes, gpus, sick=sick))
    page = assert_page(helper.render(data))
    assert_every_gpu_is_at_its_node(page, data)
    assert f"{nodes * gpus:,}" in page.shown


def test_page_of_mig_and_of_silent_hosts() -> None:
    smi = helper.facts(helper.MIG, 1, 2)
    gone = helper.facts(helper.T4, 2, 2)
    arguments = {
        "hosts": ["mig", "gone", "never"],
        "answers": [
            helper.answer("mig", helper.health(smi)),
            helper.answer("gone", {"unreachable": True, "msg": "Connection timed out"}),
        ],
        "servers": [
            {"server": "a", "result": {"msg": "refused"}},
            helper.server(
                [
                    helper.nomad_node("mig", helper.devices(smi, {0: "inference"})),
                    helper.nomad_node("gone", helper.devices(gone), status="down"),
                ]
            ),
        ],
    }
    data = helper.document(arguments)
    page = assert_page(helper.render(data))
    assert_every_gpu_is_at_its_node(page, data)
    for words in (
        "Connection timed out",
        "refused",
        "never",
        "left out of this run",
        "what Nomad last knew",
        "1g.10gb",
    ):
        assert words in page.shown, words


def test_empty_farm_is_a_page() -> None:
    page = assert_page(helper.render(helper.document({"hosts": [], "answers": [], "servers": []})))
    assert "No GPU known" in page.shown


def test_plots_need_two_reports() -> None:
    farm = helper.farm(2, 2)
    _data, history = helper.build(farm)
    assert "from the second report on" in helper.render(helper.document(farm))
    text = helper.render(helper.document(farm, history or "", made_at="2026-03-02T12:00:10Z"))
    page = assert_page(text)
    assert page.tags["svg"] == 2 and page.tags["polyline"] == 2
    assert any(name == "aria-label" and "highest" in value for _tag, name, value in page.attributes)


def hostile(value: Any) -> Any:
    """The same with a hostile text before every text that is not a word of ours."""
    if isinstance(value, dict):
        kept = ("verdict", "severity", "state", "status", "eligibility", "asked_at", "mig_mode", "type", "field")
        return {key: inner if key in kept else hostile(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [hostile(inner) for inner in value]
    return HOSTILE + value if isinstance(value, str) else value


@pytest.mark.parametrize("nodes", [3, 100])
def test_hostile_texts_are_shown_and_not_obeyed(nodes: int) -> None:
    farm = helper.farm(nodes, 2, sick=2)
    farm["answers"][0]["health"]["nvidia_smi"]["gpus"][0]["processes"] = [
        {"pid": 1, "type": "C", "name": "x", "memory_used_mib": 1}
    ]
    silent = helper.answer("silent", {"unreachable": True, "msg": "x"})
    arguments = {
        "hosts": [HOSTILE, *hostile(farm["hosts"])],
        "answers": hostile([*farm["answers"], silent]),
        "servers": [{"server": HOSTILE, "result": {"msg": HOSTILE}}, *hostile(farm["servers"])],
    }
    arguments["servers"][1]["asked_at"] = helper.MADE_AT
    data = helper.document(
        arguments, title=HOSTILE, currency=HOSTILE, models={HOSTILE: {"price_per_hour": 1, "relative_throughput": 1}}
    )
    text = helper.render(data)
    page = assert_page(text)
    assert page.shown.count(HOSTILE) > 10
    assert "&amp;lt;" not in text.replace("&amp;amp;", "")


def outputs(template: jinja_nodes.Template) -> list[jinja_nodes.Expr]:
    return [
        part
        for output in template.find_all(jinja_nodes.Output)
        for part in output.nodes
        if not isinstance(part, jinja_nodes.TemplateData)
    ]


@pytest.mark.parametrize("name", ["report.html.j2", "report.css.j2"])
def test_every_expression_is_escaped(name: str) -> None:
    """Ansible's templates are not escaped by themselves."""
    parsed = jinja2.Environment(trim_blocks=True).parse((helper.TEMPLATES / name).read_text(encoding="utf-8"))
    macros = {macro.name for macro in parsed.find_all(jinja_nodes.Macro)}
    assert name == "report.css.j2" or macros
    for part in outputs(parsed):
        is_macro = isinstance(part, jinja_nodes.Call) and getattr(part.node, "name", None) in macros
        assert is_macro or (isinstance(part, jinja_nodes.Filter) and part.name == "e"), part


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_contrast_is_that_of_level_aa(scheme: int) -> None:
    style = (helper.TEMPLATES / "report.css.j2").read_text(encoding="utf-8")
    block = re.findall(r":root \{(.*?)\}", style, re.DOTALL)[scheme]
    colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", block))
    pairs = [(word, "paper") for word in ("ink", "soft", "ok", "warning", "critical", "unknown")]
    pairs += [("ink", "panel"), ("soft", "panel")]
    pairs += [(level, f"{level}-bg") for level in ("ok", "warning", "critical", "unknown")]
    for front, back in pairs:
        low, high = sorted((luminance(colours[front]), luminance(colours[back])))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (front, back)


def test_page_of_forty_thousand_gpus_can_be_opened() -> None:
    data = helper.document(helper.farm(500, 8, sick=3))
    text = helper.render(data)
    # A GPU outside of the tables takes about 100 bytes, so that 40,000 make 4.5 MB.
    page = report_page.page(data)
    detailed = sum(len(node["gpus"]) for node in page["nodes"])
    assert detailed == report_page.DETAILED_NODES * 8
    assert len(text.encode()) < 1_000 * detailed + 130 * (4000 - detailed)
    assert Page(text).tags["tr"] < 700


# The playbook


def run_playbook(folder: Path, inventory: dict[str, Any], **variables: Any) -> subprocess.CompletedProcess[str]:
    extra = {"report_path": str(folder / "report.html"), "ansible_become": False, **variables}
    return playbook_helper.run_playbook(folder, inventory, "report.yml", "--extra-vars", json.dumps(extra))


@pytest.fixture
def fake_smi(tmp_path: Path) -> Path:
    """An nvidia-smi that answers every call with a recording, as far as that has an answer."""
    recording = helper.CORPUS / "580.159.04-h100.xml"
    path = tmp_path / "nvidia-smi"
    path.write_text(f'#!/bin/sh\ncase "$*" in "-q -x"*) exec cat {recording} ;; *) exit 0 ;; esac\n', encoding="utf-8")
    path.chmod(0o755)
    return path


def test_playbook_reports_who_answers_and_who_does_not(tmp_path: Path, fake_smi: Path) -> None:
    certificate = release_helper.new_certificate(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate.path, certificate.key)
    agent = nomad_helper.Agent(tls)
    agent.nodes = nomad_helper.recorded("nodes-1.11.3")
    agent.allocations = nomad_helper.recorded("allocations-1.11.3")
    silent = {"ansible_host": "127.0.0.1", "ansible_port": 1, "ansible_ssh_common_args": "-o BatchMode=yes"}
    options = {"path": str(fake_smi), "dcgm": False}
    uuid = helper.recording(helper.H100)["gpus"][0]["uuid"]
    # As the command line names it.
    hides = {"nomad_device_nvidia_ignored_gpu_ids": uuid}
    inventory = {
        "all": {
            "children": {
                "gpu_nodes": {
                    "hosts": {
                        "good": {**LOCAL, "gpu_health_options": options, **hides},
                        "broken": {**LOCAL, "gpu_health_options": {"timeout": -1}},
                        "silent": silent,
                    }
                },
                "nomad_servers": {"hosts": {"dead": silent, "control": LOCAL}},
            }
        }
    }
    try:
        files = {"ca": certificate.path, "cert": certificate.path, "key": certificate.key}
        variables = {
            "__nomad_local_url": agent.url, "report_title": HOSTILE.replace("{{ 7 * 7 }}", ""), "nomad_tls": "files",
            **{f"nomad_tls_{name}_file": str(path) for name, path in files.items()},
        }  # fmt: skip
        _data, before = helper.build(helper.farm(1))
        (tmp_path / "report-history.jsonl").write_text(before or "", encoding="utf-8")
        gpu = {"uuid": uuid, "serial": None, "model": "H100", "sm_count": 132, "power_limit_w": 700.0, "verdict": "ok"}
        figures = {"memory_read_gb_per_s": 2701.0}
        accepted = {
            "date": "2026-02-01T00:00:00Z", "node": HOSTILE, "level": "quick", "verdict": "failed",
            "gpus": [{**gpu, "figures": figures}],
            "problems": [{"uuid": uuid, "code": "slow_memory", "found": HOSTILE}],
        }  # fmt: skip
        (tmp_path / "gpufarm-accepted.jsonl").write_text(json.dumps(accepted) + "\n", encoding="utf-8")
        result = run_playbook(tmp_path, inventory, **variables)
    finally:
        agent.close()
    assert result.returncode == 0, result.stdout + result.stderr
    data = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    states = {node["name"]: node["state"] for node in data["nodes"]}
    assert states == {"good": "answered", "broken": "failed", "silent": "unreachable", "gpu01": "not_in_inventory"}
    assert data["nomad"]["regions"][0]["server"] == "control"
    assert [failure["server"] for failure in data["nomad"]["failures"]] == ["dead"]
    assert [(one["host"], one["state"]) for one in data["nomad"]["certificates"]] == [
        (host, "ends_soon") for host in ("broken", "control", "good")
    ]
    assert data["notices"][1]["found"].startswith("Certificates of Nomad expire soon on broken (20")
    assert {job["job_id"] for job in data["users"]["jobs"]} == {"training"}
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = assert_page(text)
    assert uuid in page.shown and "2,701 GB/s" in page.shown
    (good,) = [node for node in data["nodes"] if node["name"] == "good"]
    assert good["gpus"][0]["hidden"] is True
    benchmark = good["gpus"][0]["benchmark"]
    assert benchmark["figures"] == figures and benchmark["outliers"][0]["found"] == HOSTILE
    assert page.tags["polyline"] == 2
    # What Ansible renders is what the other tests render.
    assert text.strip() == helper.render(data).strip()
    assert len((tmp_path / "report-history.jsonl").read_text(encoding="utf-8").splitlines()) == 2


def test_playbook_without_nomad_and_with_a_foreign_history(tmp_path: Path, fake_smi: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("my notes\n", encoding="utf-8")
    good = {**LOCAL, "gpu_health_options": {"path": str(fake_smi), "dcgm": False}}
    inventory = {"all": {"children": {"gpu_nodes": {"hosts": {"good": good}}}}}
    folder = tmp_path / "folder"
    folder.mkdir()
    result = run_playbook(tmp_path, inventory, report_history="notes.txt", accept_records="folder")
    assert result.returncode == 0, result.stdout + result.stderr
    assert notes.read_text(encoding="utf-8") == "my notes\n"
    page = assert_page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "All 1" not in page.shown and "1 of 1 GPU told it" in page.shown
    assert "No Nomad server was asked" in page.shown and "move the file away" in page.shown
    assert "whether these GPUs were accepted: folder could not be read: Source is a directory" in page.shown
    # Nobody can even tell whether it is there.
    result = run_playbook(tmp_path, inventory, accept_records="notes.txt/accepted.jsonl")
    assert result.returncode == 0, result.stdout + result.stderr
    data = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert data["acceptances"]["unread"].startswith("notes.txt/accepted.jsonl could not be read: ")
    (tmp_path / "spoiled.jsonl").write_bytes(b"\xff\n")
    result = run_playbook(tmp_path, inventory, accept_records="spoiled.jsonl")
    assert result.returncode == 0, result.stdout + result.stderr
    data = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert data["acceptances"]["unread"] == "spoiled.jsonl holds 1 lines, and none is a record of an acceptance"


def test_playbook_runs_as_printed_and_nobody_becomes_root_on_the_control_machine(
    tmp_path: Path, fake_smi: Path
) -> None:
    """The README's inventory has ansible_become for all hosts, which counts for the implicit localhost as well."""
    scripts = {
        "forbidden": 'echo "$*" >>"$0.called"; exit 1',
        # As sudo: its options, then a shell with the command.
        "allowed": 'echo "$*" >>"$0.called"; while [ "$1" != /bin/sh ]; do shift; done; exec "$@"',
    }
    for name, body in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    options = {"path": str(fake_smi), "dcgm": False}
    good = {**LOCAL, "ansible_become_exe": str(tmp_path / "allowed"), "gpu_health_options": options}
    inventory = {
        "all": {
            "vars": {"ansible_become": True, "ansible_become_exe": str(tmp_path / "forbidden")},
            "children": {"gpu_nodes": {"hosts": {"good": good}}},
        }
    }
    result = playbook_helper.run_playbook(tmp_path, inventory, "report.yml")
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "allowed.called").exists() and not (tmp_path / "forbidden.called").exists()
    data = json.loads((tmp_path / "gpufarm-report.json").read_text(encoding="utf-8"))
    assert [(node["name"], node["state"]) for node in data["nodes"]] == [("good", "answered")]
    assert_page((tmp_path / "gpufarm-report.html").read_text(encoding="utf-8"))


def test_playbook_refuses_a_path_that_is_no_page(tmp_path: Path) -> None:
    inventory = {"all": {"children": {"gpu_nodes": {"hosts": {"good": {"ansible_connection": "local"}}}}}}
    result = run_playbook(tmp_path, inventory, report_path="report.json")
    assert result.returncode != 0
    assert "good: report_path is report.json. Expected: " in " ".join(result.stdout.split())
    assert not (tmp_path / "report.json").exists()


def test_playbook_reports_nodes_of_kubernetes_alone(tmp_path: Path, fake_smi: Path) -> None:
    cluster = kubernetes_helper.Cluster(tmp_path)
    cluster.nodes = [kubernetes_helper.make_node(0, 1), kubernetes_helper.make_node(1, 4, labels={})]
    asked = playbook_helper.asked_of(cluster, tmp_path)
    local = {**LOCAL, "gpu_health_options": {"path": str(fake_smi), "dcgm": False}}
    away = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}
    inventory = {
        "all": {
            "vars": {**asked, "kubernetes_api_host": "localhost"},
            "children": {
                "kubernetes_nodes": {
                    "hosts": {
                        "good": {**local, "kubernetes_node_name": "node00000"},
                        "away": {**away, "kubernetes_node_name": "node00001"},
                    }
                }
            },
        }
    }
    try:
        result = run_playbook(tmp_path, inventory)
    finally:
        cluster.close()
    assert result.returncode == 0, result.stdout + result.stderr
    data = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    nodes = {node["name"]: node for node in data["nodes"]}
    assert {name: node["state"] for name, node in nodes.items()} == {"good": "answered", "away": "unreachable"}
    assert {name: node["kubernetes"]["devices_allocatable"] for name, node in nodes.items()} == {"good": 1, "away": 4}
    assert (data["kubernetes"]["host"], data["kubernetes"]["answered"]) == ("localhost", True)
    assert data["notices"] == [] and data["nomad"]["regions"] == []
    # A cluster that is gone costs the report nothing else.
    result = run_playbook(tmp_path, inventory)
    assert result.returncode == 0, result.stdout + result.stderr
    data = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert "Kubernetes could not be asked on localhost" in data["notices"][0]["found"]
    assert {node["name"]: node["verdict"] for node in data["nodes"]}["good"] == "ok"

"""The commands that README and docs print, and which test runs each of them."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from tests.simulator.cache import ROOT

FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
FARM = "molecule/farm/tests/test_as_printed.py"
BUNDLE = "molecule/bundle/tests/test_bundle.py"
ACCEPT = "tests/unit/simulator/gpu/test_accept.py"
BENCHMARK = "tests/unit/simulator/gpu/test_benchmark.py"
SECURE = "molecule/secure/tests/test_secure.py"
SCENARIOS = "tests/scenarios/test_scenarios.py"
# What runs a command: a command that matches none of these fails test_printed.py.
SETUP = "tests/unit/playbooks/test_wsl_setup.py"
RUN_BY = {
    # These would start this suite or a second farm, so their rules are held to what the suite itself runs.
    r"make (setup|demo|demo-down|test|lint|bench)": "tests/scenarios/test_printed.py",
    r"ansible-galaxy collection install gpufarm\.core": FARM,
    r"ansible-playbook -i my-lab\.yml gpufarm\.core\.(site|verify|health|report)": FARM,
    r"ansible-playbook -i my-lab\.yml gpufarm\.core\.(bundle|site) -e gpufarm_bundle=/srv/bundle": BUNDLE,
    r"ansible-playbook -i my-lab\.yml gpufarm\.core\.accept --limit rack1-a": ACCEPT,
    r"python3 plugins/module_utils/gpu_benchmark/measuring\.py --level quick --format json": BENCHMARK,
    r"cd my-lab-secrets": SECURE,
    r"export NOMAD_ADDR=https://192\.0\.2\.10:4646 NOMAD_CACERT=\$PWD/nomad-ca\.pem": SECURE,
    r"export NOMAD_CLIENT_CERT=\$PWD/nomad-cli\.pem NOMAD_CLIENT_KEY=\$PWD/nomad-cli-key\.pem": SECURE,
    r"export NOMAD_TOKEN=\"\$\(cat nomad-management-token\.txt\)\"": SECURE,
    r"nomad node status": SECURE,
    r"cd ~/\.ansible/collections/ansible_collections/gpufarm/core": FARM,
    r"ansible-inventory -i examples/inventories/lab\.wsl\.yml --graph": "tests/unit/plugins/inventory/test_wsl.py",
    r"ansible-playbook -i my-lab gpufarm\.core\.wsl_hosts": "tests/unit/playbooks/test_wsl_hosts.py",
    r"cd && curl\.exe -fsSL https://\S+/examples/wsl/setup\.sh >setup\.sh": SETUP,
    r"mkdir my-lab-secrets/gaming-pc": SECURE,
    r"cp my-lab-secrets/nomad-ca\.pem my-lab-secrets/nomad-farm-token\.txt my-lab-secrets/gaming-pc": SECURE,
    r"cd my-lab-secrets/gaming-pc": SECURE,
    r"nomad tls cert create -client -region=global -ca \.\./nomad-ca\.pem -key \.\./nomad-ca-key\.pem": SECURE,
    r"sh setup\.sh --secrets gaming-pc 192\.0\.2\.10": SECURE,
    r"nomad job run examples/jobs/gpu-docker\.nomad\.hcl": FARM,
    r"\.venv/bin/molecule (test|converge) -s common": SCENARIOS,
    r"export GPUFARM_CORE=\$PWD": SCENARIOS,
    r"cp -r examples/molecule/gpu_motd ~/ && cd ~/gpu_motd": SCENARIOS,
    r"\$GPUFARM_CORE/\.venv/bin/molecule (test --destroy=never|login|destroy)": SCENARIOS,
}


def fences(document: Path) -> list[tuple[str, str]]:
    """Return the fenced blocks of a document: language and text."""
    return [(kind, textwrap.dedent(text)) for kind, text in FENCE.findall(document.read_text(encoding="utf-8"))]


def commands(block: str) -> list[str]:
    """Return a block's commands, without the comments behind them."""
    return [line for line in (re.sub(r"(^|\s+)#.*", "", line).strip() for line in block.splitlines()) if line]


def block(document: Path, first: str) -> str:
    """Return the one block of commands of a document that begins so."""
    (found,) = [text for kind, text in fences(document) if kind == "sh" and text.startswith(first)]
    return found

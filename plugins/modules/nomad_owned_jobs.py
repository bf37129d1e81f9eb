#!/usr/bin/python
# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Keep the jobs in Nomad that belong to somebody, with what they may do and the secrets that they read."""

from __future__ import annotations

DOCUMENTATION = r"""
module: nomad_owned_jobs
short_description: Keep the Nomad jobs of one owner, with their rights and secrets
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Registers jobs that are missing or differ, as Nomad's own plan tells, and takes away all others of that owner,
    whatever their names and namespaces. The owner stands in the meta of each job, as C(gpufarm_owner).
  - A job of that name which is somebody else's is refused, before anything changes.
  - With a job go its Nomad variable and the ACL policy of its workload identity. What a parameterized job has
    dispatched goes on; what still waits for a node would wait there for the variable for ever, so it is stopped.
extends_documentation_fragment:
  - gpufarm.core.nomad
  - gpufarm.core.nomad.actiongroup_nomad
attributes:
  check_mode:
    support: full
    description: Can run in C(check_mode) and says what would change.
  diff_mode:
    support: none
    description: A job may hold what its owner shows nobody.
  idempotent:
    support: full
    description: A job that Nomad's plan finds unchanged is not registered again.
  platform:
    description: Runs wherever Nomad's HTTP API can be reached.
options:
  token:
    description:
      - A management token, which alone may give rights to jobs. Not needed where Nomad has no ACLs.
  owner:
    description:
      - Who these jobs belong to.
    type: str
    required: true
  jobs:
    description:
      - All jobs that the owner is to have.
    type: list
    elements: dict
    default: []
    suboptions:
      spec:
        description: The job as C(POST /v1/jobs) takes it. C(ID) is of letters, digits and dashes.
        type: dict
        required: true
      variables:
        description:
          - What the job finds in its Nomad variable C(nomad/jobs/ID). The index of the variable comes into the job's
            meta, so that other values start it anew.
        type: dict
      rights:
        description:
          - An ACL policy of the job's workload identity, in Nomad's own language. Left out where Nomad has no ACLs.
        type: str
seealso:
  - module: gpufarm.core.nomad_acl
"""

EXAMPLES = r"""
- name: Have one job of this team, and no other
  gpufarm.core.nomad_owned_jobs:
    owner: research
    jobs:
      - spec: "{{ lookup('ansible.builtin.file', 'job.json') | from_json }}"
        variables:
          PASSWORD: "{{ vault_password }}"
        rights: namespace "default" { policy = "read" }
  no_log: true
"""

RETURN = r"""
registered:
  description: IDs of the jobs that are new or were other than they are to be.
  type: list
  elements: str
  returned: success
  sample: [wandb-launch]
removed:
  description: IDs of the owner's jobs that were taken away.
  type: list
  elements: str
  returned: success
  sample: []
stopped:
  description: IDs of jobs that removed ones had dispatched, and that still waited for a node.
  type: list
  elements: str
  returned: success
  sample: []
"""

import platform
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufarm.core.plugins.module_utils import nomad, nomad_options

SECRET = "gpufarm_variable"


def job_path(job: str, *more: str) -> str:
    return "/".join(["/v1/job", urllib.parse.quote(job, safe=""), *more])


def variable_path(job: str) -> str:
    return f"/v1/var/nomad/jobs/{job}"


def policy_path(namespace: str, job: str) -> str:
    return f"/v1/acl/policy/gpufarm-job-{namespace}-{job}"


class Jobs:
    """The jobs of an owner, and what was to be written."""

    def __init__(self, client: nomad.Client, owner: str, check_mode: bool) -> None:
        self._client = client
        self._owner = owner
        self._check_mode = check_mode
        self._acls = False
        self.changed = False
        self.registered: list[str] = []
        self.removed: list[str] = []
        self.stopped: list[str] = []

    def _in(self, namespace: str) -> nomad.Client:
        return self._client.in_namespace(namespace)

    def _write(self, client: nomad.Client, method: str, path: str, body: Any = None, **query: str) -> Any:
        self.changed = True
        return None if self._check_mode else client.call(method, path, body, query)

    def require_management(self) -> None:
        """Have a token that sees every job; to others Nomad lists those that they may see, without a word."""
        own = self._client.own_token()
        self._acls = own is not None
        if own and own["Type"] != "management":
            raise may_not(f"the token '{own['Name']}' is of type {own['Type']}")

    def owned(self) -> list[tuple[str, str]]:
        """Namespace and ID of each job that is the owner's."""
        every = self._in("*").items("/v1/jobs", {"meta": "true"}).items
        return sorted((each["Namespace"], each["ID"]) for each in every if nomad.owner_of(each) == self._owner)

    def check(self, wanted: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        """The index of each job that is there; raise NomadError for what cannot be had."""
        found: dict[str, int] = {}
        for each in wanted:
            name, namespace = str(each["spec"].get("ID") or ""), each["spec"].get("Namespace") or "default"
            if not re.fullmatch("[a-zA-Z0-9-]{1,60}", name) or name in found:
                raise nomad.NomadError(
                    found=f"'{name}' is given as the ID of a job",
                    expected="letters, digits and dashes, at most 60, and each once",
                    next_step="correct it in 'jobs'",
                )
            there = self._in(namespace).find(job_path(name))
            if there and not there["Stop"] and (owner := nomad.owner_of(there)) != self._owner:
                raise nomad.NomadError(
                    found=f"the job '{name}' in namespace '{namespace}' belongs to {owner or 'somebody else'}",
                    expected=f"none, or one of {self._owner}",
                    next_step="choose another name, or have it taken away there",
                )
            found[name] = there["JobModifyIndex"] if there else 0
        return found

    def have_variable(self, client: nomad.Client, name: str, values: Mapping[str, Any]) -> int:
        """Have the secrets of a job; the index by which they are told apart, 0 where it is not known yet."""
        there = client.find(variable_path(name))
        if there and there["Items"] == values:
            return int(there["ModifyIndex"])
        made = self._write(client, "PUT", variable_path(name), {"Items": values})
        return int(made["ModifyIndex"]) if made else 0

    def policy(self, path: str) -> Mapping[str, Any] | None:
        """A policy, empty where it is not there; None where Nomad has no ACLs."""
        return self._client.find(path) or {} if self._acls else None

    def have_rights(self, namespace: str, name: str, rights: str) -> None:
        path = policy_path(namespace, name)
        wanted = {
            "Name": path.rpartition("/")[2],
            "Description": f"Of {self._owner}",
            "Rules": rights,
            "JobACL": {"Namespace": namespace, "JobID": name},
        }
        there = self.policy(path)
        if there is None:
            return
        same = there and all(there.get(key) == wanted[key] for key in ("Description", "Rules"))
        if not same or {key: there["JobACL"].get(key) for key in ("Namespace", "JobID")} != wanted["JobACL"]:
            self._write(self._client, "POST", path, wanted)

    def differs(self, wanted: Mapping[str, Any], index: int = 0) -> dict[str, Any] | None:
        """The job where Nomad would change something for it, with this index of its variable."""
        spec = wanted["spec"]
        meta = {**(spec.get("Meta") or {}), nomad.JOBS_OWNER_KEY: self._owner}
        if wanted["variables"]:
            meta[SECRET] = str(index)
        job = {**spec, "Meta": meta}
        client = self._in(spec.get("Namespace") or "default")
        planned = client.call("POST", job_path(spec["ID"], "plan"), {"Job": job, "Diff": True})
        return None if planned["Diff"]["Type"] == "None" else job

    def have(self, wanted: Mapping[str, Any], index: int) -> None:
        spec = wanted["spec"]
        name, namespace = spec["ID"], spec.get("Namespace") or "default"
        client = self._in(namespace)
        variable = self.have_variable(client, name, wanted["variables"]) if wanted["variables"] else 0
        if wanted["rights"]:
            self.have_rights(namespace, name, wanted["rights"])
        job = self.differs(wanted, variable)
        if job:
            self.registered.append(name)
            self._write(client, "POST", "/v1/jobs", {"Job": job, "EnforceIndex": True, "JobModifyIndex": index})

    def lack(self, namespace: str, name: str) -> None:
        """Take a job away, and with it what was its alone; the job last, because it is what tells of the others."""
        client = self._in(namespace)
        for child in client.items("/v1/jobs", {"prefix": f"{name}/dispatch-"}).items:
            if child["Status"] == "pending":
                self._write(client, "DELETE", job_path(child["ID"]))
                self.stopped.append(child["ID"])
        if self.policy(policy_path(namespace, name)):
            self._write(self._client, "DELETE", policy_path(namespace, name))
        self._write(client, "DELETE", variable_path(name))
        self._write(client, "DELETE", job_path(name), purge="true")
        self.removed.append(name)


def may_not(found: str) -> nomad.NomadError:
    return nomad.NomadError(
        found=found,
        expected="a management token",
        next_step="set 'token' or NOMAD_TOKEN to one, or nomad_token of the roles",
    )


def explained(error: nomad.NomadError) -> nomad.NomadError:
    """What Nomad refuses, with what to do about it here."""
    # Of a token that it does not know it says either.
    if error.status in (403, 404):
        return may_not(error.found)
    # Some of what is wrong with a job is a failure to Nomad.
    if error.status == 400 or (error.status == 500 and "leader" not in error.said):
        return nomad.NomadError(
            found=error.found,
            expected="a job that Nomad takes",
            next_step="correct what it names: a namespace, a node pool or an option",
        )
    return error


def apply(jobs: Jobs, wanted: Sequence[Mapping[str, Any]]) -> None:
    jobs.require_management()
    indexes = jobs.check(wanted)
    owned = jobs.owned()
    # What Nomad would refuse it refuses before a secret or a right is written.
    for each in wanted:
        jobs.differs(each)
    for each in wanted:
        jobs.have(each, indexes[each["spec"]["ID"]])
    kept = {(each["spec"].get("Namespace") or "default", each["spec"]["ID"]) for each in wanted}
    for namespace, name in owned:
        if (namespace, name) not in kept:
            jobs.lack(namespace, name)


def main() -> None:
    job = {
        "spec": {"type": "dict", "required": True},
        "variables": {"type": "dict", "no_log": True},
        "rights": {"type": "str"},
    }
    module = AnsibleModule(
        argument_spec={
            **nomad_options.argument_spec(),
            "owner": {"type": "str", "required": True},
            "jobs": {"type": "list", "elements": "dict", "default": [], "options": job},
        },
        required_together=nomad_options.REQUIRED_TOGETHER,
        supports_check_mode=True,
    )
    params = module.params
    try:
        client = nomad.Client(nomad_options.connection_of(params))
        jobs = Jobs(client, params["owner"], module.check_mode)
        apply(jobs, params["jobs"])
    except nomad.NomadError as error:
        module.fail_json(msg=f"{platform.node()}: {explained(error)}")
    module.exit_json(changed=jobs.changed, registered=jobs.registered, removed=jobs.removed, stopped=jobs.stopped)


if __name__ == "__main__":
    main()

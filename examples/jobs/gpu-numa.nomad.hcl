# Runs a program on one GPU without a container, on the CPUs and in the memory of the NUMA node that the GPU is at. The block
# numa is Nomad Enterprise's, so the job binds itself: it asks the kernel where the GPU is that Nomad has assigned.
#
#   nomad job run examples/jobs/gpu-numa.nomad.hcl
#   nomad job run -var 'command=["/opt/venv/bin/python", "/srv/train.py"]' examples/jobs/gpu-numa.nomad.hcl
#
# Needs raw_exec on the node (nomad_client_raw_exec). Memory is kept to the node where numactl is installed; taskset, which
# every distribution has, keeps the CPUs. Do not ask for `cores`: Nomad takes them from any NUMA node, and the job could not
# leave them.

variable "datacenters" {
  type    = list(string)
  default = ["*"]
}

variable "command" {
  type        = list(string)
  default     = ["grep", "-E", "^(Cpus|Mems)_allowed_list", "/proc/self/status"]
  description = "Program and arguments; without any, the job tells what it was bound to."
}

job "gpu-numa" {
  type        = "batch"
  datacenters = var.datacenters

  # Nomad takes a job that has ended, and is told once more as it was, for done.
  meta {
    run = uuidv4()
  }

  group "gpu" {
    restart {
      attempts = 1
      mode     = "fail"
    }

    task "program" {
      driver = "raw_exec"

      template {
        data            = file("examples/jobs/gpu-numa/near.sh")
        destination     = "local/near.sh"
        left_delimiter  = "[[["
        right_delimiter = "]]]"
      }

      config {
        command = "/bin/sh"
        args    = concat(["local/near.sh"], var.command)
      }

      resources {
        cpu    = 200
        memory = 1024

        device "nvidia/gpu" {
          count = 1
        }
      }
    }
  }
}

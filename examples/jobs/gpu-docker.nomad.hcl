# Prints what nvidia-smi sees inside a container on the GPUs that Nomad assigned.
#
#   nomad job run examples/jobs/gpu-docker.nomad.hcl
#   nomad job run -var count=2 -var model='Tesla T4' examples/jobs/gpu-docker.nomad.hcl

variable "datacenters" {
  type    = list(string)
  default = ["*"]
}

variable "image" {
  type        = string
  default     = "nvidia/cuda:12.8.1-base-ubuntu24.04"
  description = "Any image with the C library; the container toolkit brings nvidia-smi along."
}

variable "count" {
  type        = number
  default     = 1
  description = "GPUs that the task gets, all of one node and one model."
}

variable "memory_mib" {
  type        = number
  default     = 4096
  description = "Memory that each GPU must have at least."
}

variable "model" {
  type        = string
  default     = ".*"
  description = "Regular expression of the models to prefer, such as \"H100|A100\"."
}

variable "node" {
  type        = string
  default     = ""
  description = "Inventory name of the only node that may run the job; empty: any."
}

job "gpu-docker" {
  type        = "batch"
  datacenters = var.datacenters

  # Nomad takes a job that has ended, and is told once more as it was, for done.
  meta {
    run = uuidv4()
  }

  constraint {
    attribute = "${node.unique.name}"
    operator  = "regexp"
    value     = var.node == "" ? ".*" : "^${var.node}$"
  }

  group "gpu" {
    restart {
      attempts = 1
      mode     = "fail"
    }

    reschedule {
      attempts  = 0
      unlimited = false
    }

    task "nvidia-smi" {
      driver = "docker"

      config {
        image        = var.image
        network_mode = "none"
        command      = "sh"
        # Nomad names the assigned devices to the NVIDIA runtime, which hands in just these.
        # A container that ends at once can take the end of its log with it (hashicorp/nomad#6931).
        args = ["-c", "nvidia-smi -L && nvidia-smi && sleep 2"]
      }

      resources {
        cpu    = 100
        memory = 256

        device "nvidia/gpu" {
          count = var.count

          constraint {
            attribute = "${device.attr.memory}"
            operator  = ">="
            value     = "${var.memory_mib} MiB"
          }

          affinity {
            attribute = "${device.model}"
            operator  = "regexp"
            value     = var.model
            weight    = 100
          }
        }
      }
    }
  }
}

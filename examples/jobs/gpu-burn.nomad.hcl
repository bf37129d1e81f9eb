# Keeps every GPU of every node busy for a while and fails where one computes wrongly; the logs have TFLOP/s.
# A node takes it as a whole, so each of its GPUs must be free; nodes of another number of GPUs are left out.
# Nomad 1.10 takes no job of this type without a block `reschedule` in its group, which 1.11 refuses.
#
#   nomad job run -var gpus=8 examples/jobs/gpu-burn.nomad.hcl
#   nomad job run -var gpus=1 -var seconds=600 examples/jobs/gpu-burn.nomad.hcl

variable "datacenters" {
  type    = list(string)
  default = ["*"]
}

variable "gpus" {
  type        = number
  description = "GPUs of a node; the meta gpu_count, which the role nomad_client writes, tells Nomad which nodes have them."
}

variable "seconds" {
  type        = number
  default     = 60
  description = "How long each GPU is busy."
}

variable "image" {
  type        = string
  default     = "pytorch/pytorch:2.9.1-cuda12.8-cudnn9-runtime"
  description = "Image with Python and PyTorch."
}

variable "command" {
  type    = list(string)
  default = ["python", "/local/burn.py"]
}

job "gpu-burn" {
  type        = "sysbatch"
  datacenters = var.datacenters

  # Nomad takes a job that has ended, and is told once more as it was, for done.
  meta {
    run = uuidv4()
  }

  constraint {
    attribute = "${meta.gpu_count}"
    value     = "${var.gpus}"
  }

  group "gpu" {
    restart {
      attempts = 0
      mode     = "fail"
    }

    task "burn" {
      driver = "docker"

      template {
        data            = file("examples/jobs/gpu-burn/burn.py")
        destination     = "local/burn.py"
        left_delimiter  = "[[["
        right_delimiter = "]]]"
      }

      env {
        BURN_SECONDS = "${var.seconds}"
      }

      config {
        image        = var.image
        network_mode = "none"
        command      = var.command[0]
        args         = slice(var.command, 1, length(var.command))
      }

      resources {
        cpu = 500
        # PyTorch takes 600 MB for each GPU, in a process of its own, and 500 MB for the one that waits for them.
        memory = 1024 * (1 + var.gpus)

        device "nvidia/gpu" {
          count = var.gpus
        }
      }
    }
  }
}

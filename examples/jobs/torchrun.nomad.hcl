# Trains on several GPUs of one node: torchrun starts one process for each GPU that Nomad assigned.
#
#   nomad job run -var gpus=4 examples/jobs/torchrun.nomad.hcl
#   nomad job run -var gpus=8 -var 'model=H100|H200|A100-SXM' -var program=my_training.py examples/jobs/torchrun.nomad.hcl
#
# Open-source Nomad knows neither NVLink nor NUMA: it hands out GPUs of one node and one model, in any order (the block
# numa is Enterprise's). So whoever needs NVLink asks for a model that has it, and best for all GPUs of a node.

variable "datacenters" {
  type    = list(string)
  default = ["*"]
}

variable "gpus" {
  type    = number
  default = 2
}

variable "model" {
  type        = string
  default     = ".*"
  description = "Regular expression of the models that may be used."
}

variable "program" {
  type        = string
  default     = "examples/jobs/torchrun/train.py"
  description = "Python file to run."
}

variable "image" {
  type        = string
  default     = "pytorch/pytorch:2.9.1-cuda12.8-cudnn9-runtime"
  description = "Image with Python and PyTorch."
}

variable "launcher" {
  type    = list(string)
  # Its processes meet at an address; without a network the container's own name has none, and they would wait for ever.
  default = ["torchrun", "--standalone", "--local-addr=127.0.0.1"]
}

variable "memory" {
  type        = number
  default     = 16384
  description = "Memory of the task in MB, what its processes share by /dev/shm included."
}

job "torchrun" {
  type        = "batch"
  datacenters = var.datacenters

  # Nomad takes a job that has ended, and is told once more as it was, for done.
  meta {
    run = uuidv4()
  }

  group "training" {
    restart {
      attempts = 1
      delay    = "30s"
      mode     = "fail"
    }

    # On another node, where this one may be the cause; a program that writes checkpoints goes on from its last.
    reschedule {
      attempts       = 2
      interval       = "24h"
      delay          = "1m"
      delay_function = "constant"
      unlimited      = false
    }

    task "train" {
      driver = "docker"

      template {
        data            = file(var.program)
        destination     = "local/program.py"
        left_delimiter  = "[[["
        right_delimiter = "]]]"
      }

      env {
        RESULT_DIR      = "/alloc/data"
        OMP_NUM_THREADS = "4"
      }

      config {
        image        = var.image
        network_mode = "none"
        # NCCL and data loaders share memory between processes; Docker's own is 64 MB.
        shm_size = var.memory * 1024 * 1024 / 2
        command  = var.launcher[0]
        args     = concat(slice(var.launcher, 1, length(var.launcher)), ["--nproc-per-node=${var.gpus}", "/local/program.py"])

        ulimit {
          memlock = "-1"
          stack   = "67108864"
        }
      }

      resources {
        cpu    = 1000
        memory = var.memory

        device "nvidia/gpu" {
          count = var.gpus

          constraint {
            attribute = "${device.model}"
            operator  = "regexp"
            value     = var.model
          }
        }
      }
    }
  }
}

# Runs a Python program on one GPU without a container: a prestart task makes a virtual environment, the main
# task runs the program on the GPU that Nomad assigned, and a poststop task brings the result home to a host volume.
#
#   nomad job run examples/jobs/gpu-python.nomad.hcl
#   nomad job run -var program=my_training.py -var 'packages=["torch", "numpy"]' examples/jobs/gpu-python.nomad.hcl
#
# Needs raw_exec on the node (nomad_client_raw_exec), a host volume (nomad_client_host_volumes), and Python with venv: the
# package python3-venv on Debian and Ubuntu, python3.12 and -var python=/usr/bin/python3.12 on RHEL 9.

variable "datacenters" {
  type    = list(string)
  default = ["*"]
}

variable "program" {
  type        = string
  default     = "examples/jobs/gpu-python/train.py"
  description = "Python file to run; it writes its result to the folder $RESULT_DIR."
}

variable "packages" {
  type        = list(string)
  default     = ["torch==2.9.*", "numpy"]
  description = "What pip installs for the program."
}

variable "python" {
  type    = string
  default = "/usr/bin/python3"
}

variable "image" {
  type        = string
  default     = "busybox:1.37"
  description = "Image with sh and cp, for the task that copies the result."
}

variable "volume" {
  type        = string
  default     = "results"
  description = "Host volume that receives the result."
}

variable "memory_mib" {
  type    = number
  default = 4096
}

job "gpu-python" {
  type        = "batch"
  datacenters = var.datacenters

  # Nomad takes a job that has ended, and is told once more as it was, for done.
  meta {
    run = uuidv4()
  }

  group "gpu" {
    volume "results" {
      type   = "host"
      source = var.volume
    }

    restart {
      attempts = 1
      mode     = "fail"
    }

    reschedule {
      attempts  = 0
      unlimited = false
    }

    task "environment" {
      driver = "raw_exec"

      lifecycle {
        hook = "prestart"
      }

      config {
        command = "/bin/sh"
        args = [
          "-euc",
          "${var.python} -c 'import ensurepip, venv' || { echo 'found no venv of ${var.python}. Expected: one. Next step: install python3-venv on the node' >&2; exit 1; }; ${var.python} -m venv \"$NOMAD_ALLOC_DIR/venv\" && TMPDIR=\"$NOMAD_TASK_DIR\" \"$NOMAD_ALLOC_DIR/venv/bin/pip\" install --quiet --no-cache-dir --disable-pip-version-check ${join(" ", formatlist("'%s'", var.packages))}",
        ]
      }

      resources {
        cpu    = 100
        memory = 1024
      }
    }

    task "program" {
      driver = "raw_exec"

      template {
        data            = file(var.program)
        destination     = "local/program.py"
        left_delimiter  = "[[["
        right_delimiter = "]]]"
      }

      config {
        command = "/bin/sh"
        # Without a container nothing hides the other GPUs, so the program is told which one is its own.
        args = [
          "-euc",
          "export CUDA_VISIBLE_DEVICES=\"$NVIDIA_VISIBLE_DEVICES\" RESULT_DIR=\"$NOMAD_ALLOC_DIR/result\"; mkdir -p \"$RESULT_DIR\"; exec \"$NOMAD_ALLOC_DIR/venv/bin/python\" \"$NOMAD_TASK_DIR/program.py\"",
        ]
      }

      resources {
        cpu    = 200
        memory = 1024

        device "nvidia/gpu" {
          count = 1

          constraint {
            attribute = "${device.attr.memory}"
            operator  = ">="
            value     = "${var.memory_mib} MiB"
          }
        }
      }
    }

    task "bring-home" {
      driver = "docker"

      lifecycle {
        hook = "poststop"
      }

      config {
        image        = var.image
        network_mode = "none"
        command      = "sh"
        args         = ["-euc", "mkdir -p \"/results/$NOMAD_ALLOC_ID\" && cp -R /alloc/result/. \"/results/$NOMAD_ALLOC_ID/\""]
      }

      volume_mount {
        volume      = "results"
        destination = "/results"
      }

      resources {
        cpu    = 50
        memory = 64
      }
    }
  }
}

# Runs an MLflow project on one GPU of a chosen model, without a container, and brings its runs home.
#
#   nomad job run -var 'model=A100|H100' examples/jobs/mlflow.nomad.hcl
#   nomad job run -var project=git::https://git.example.com/team/project -var tracking_uri=https://mlflow.example.com \
#     -var 'parameters=["-P", "epochs=3"]' examples/jobs/mlflow.nomad.hcl
#
# Needs raw_exec on the node (nomad_client_raw_exec), a host volume (nomad_client_host_volumes), and Python with venv: the
# package python3-venv on Debian and Ubuntu, python3.12 and -var python=/usr/bin/python3.12 on RHEL 9, git for the project.

variable "datacenters" {
  type    = list(string)
  default = ["*"]
}

variable "project" {
  type        = string
  default     = "git::https://github.com/mlflow/mlflow-example"
  description = "Where the project is fetched from (go-getter): a folder with the file MLproject."
}

variable "packages" {
  type        = list(string)
  default     = ["mlflow==3.*", "scikit-learn", "pandas"]
  description = "What pip installs: MLflow and what the project needs."
}

variable "parameters" {
  type        = list(string)
  default     = []
  description = "Arguments of `mlflow run`, such as -P and name=value."
}

variable "tracking_uri" {
  type        = string
  default     = ""
  description = "MLflow's tracking server; empty: a file among the results."
}

variable "model" {
  type        = string
  default     = ".*"
  description = "Regular expression of the models that may be used; others would distort what the run measures."
}

variable "python" {
  type    = string
  default = "/usr/bin/python3"
}

variable "volume" {
  type        = string
  default     = "results"
  description = "Host volume that receives the runs."
}

variable "image" {
  type        = string
  default     = "busybox:1.37"
  description = "Image with sh and cp, for the task that copies the runs."
}

job "mlflow" {
  type        = "batch"
  datacenters = var.datacenters

  # Nomad takes a job that has ended, and is told once more as it was, for done.
  meta {
    run = uuidv4()
  }

  group "run" {
    volume "results" {
      type   = "host"
      source = var.volume
    }

    # First on the same node, then on others, with more time between each.
    restart {
      attempts = 2
      interval = "1h"
      delay    = "30s"
      mode     = "fail"
    }

    reschedule {
      attempts       = 3
      interval       = "24h"
      delay          = "1m"
      delay_function = "exponential"
      max_delay      = "30m"
      unlimited      = false
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

    task "mlflow" {
      driver = "raw_exec"

      artifact {
        source      = var.project
        destination = "local/project"
      }

      env {
        TRACKING_URI = var.tracking_uri
      }

      config {
        command = "/bin/sh"
        # Without a container nothing hides the other GPUs, so the program is told which one is its own.
        args = concat([
          "-euc",
          "export CUDA_VISIBLE_DEVICES=\"$NVIDIA_VISIBLE_DEVICES\" PATH=\"$NOMAD_ALLOC_DIR/venv/bin:$PATH\"; mkdir -p \"$NOMAD_ALLOC_DIR/result\"; export MLFLOW_TRACKING_URI=\"$${TRACKING_URI:-sqlite:///$NOMAD_ALLOC_DIR/result/mlflow.db}\"; cd \"$NOMAD_ALLOC_DIR/result\"; exec mlflow run \"$NOMAD_TASK_DIR/project\" --env-manager=local \"$@\"",
          "mlflow",
        ], var.parameters)
      }

      resources {
        cpu    = 500
        memory = 4096

        device "nvidia/gpu" {
          count = 1

          constraint {
            attribute = "${device.model}"
            operator  = "regexp"
            value     = var.model
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

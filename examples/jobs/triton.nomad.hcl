# Serves models with NVIDIA's Triton: ports, a health check, shared memory, and a client that asks it once.
#
#   nomad job run -var models=https://example.com/models.tar.gz examples/jobs/triton.nomad.hcl
#   nomad service info triton
#
# An archive of models holds a folder a model, as in Triton's documentation: NAME/config.pbtxt, NAME/1/model.onnx.

variable "datacenters" {
  type    = list(string)
  default = ["*"]
}

variable "models" {
  type        = string
  description = "URL of an archive with the model repository, or a folder of it in S3 or git (go-getter)."
}

variable "image" {
  type        = string
  default     = "nvcr.io/nvidia/tritonserver:25.08-py3"
  description = "Triton; its release notes tell the oldest driver for each."
}

variable "client_image" {
  type        = string
  default     = "curlimages/curl:8.15.0"
  description = "Image with curl."
}

variable "memory_mib" {
  type        = number
  default     = 8192
  description = "Memory that the GPU must have at least."
}

job "triton" {
  type        = "service"
  datacenters = var.datacenters

  update {
    max_parallel     = 1
    health_check     = "checks"
    min_healthy_time = "10s"
    # The image is large, and models are loaded before it says that it is ready.
    healthy_deadline  = "30m"
    progress_deadline = "1h"
    auto_revert       = true
  }

  group "triton" {
    network {
      port "http" {
        to = 8000
      }

      port "grpc" {
        to = 8001
      }

      port "metrics" {
        to = 8002
      }
    }

    restart {
      attempts = 3
      interval = "10m"
      delay    = "15s"
      mode     = "fail"
    }

    service {
      name     = "triton"
      port     = "http"
      provider = "nomad"

      check {
        type     = "http"
        path     = "/v2/health/ready"
        interval = "10s"
        timeout  = "5s"
      }
    }

    service {
      name     = "triton-grpc"
      port     = "grpc"
      provider = "nomad"
    }

    task "server" {
      driver       = "docker"
      kill_timeout = "30s"

      artifact {
        source      = var.models
        destination = "local/models"
      }

      config {
        image    = var.image
        ports    = ["http", "grpc", "metrics"]
        command  = "tritonserver"
        args     = ["--model-repository=/local/models", "--exit-on-error=false"]
        shm_size = 1073741824

        ulimit {
          memlock = "-1"
          stack   = "67108864"
        }
      }

      resources {
        cpu    = 2000
        memory = 8192

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

    # What other jobs do: they find it by Nomad's services and ask it. This one ends after its answer.
    task "client" {
      driver = "docker"

      lifecycle {
        hook = "poststart"
      }

      restart {
        attempts = 60
        interval = "30m"
        delay    = "20s"
        mode     = "fail"
      }

      template {
        data        = "{{ range nomadService \"triton\" }}TRITON=http://{{ .Address }}:{{ .Port }}\n{{ end }}"
        destination = "local/triton.env"
        env         = true
        change_mode = "noop"
      }

      config {
        image   = var.client_image
        command = "sh"
        args    = ["-euc", "curl --fail --silent --show-error \"$TRITON/v2/health/ready\" && curl --fail --silent -X POST \"$TRITON/v2/repository/index\""]
      }

      resources {
        cpu    = 50
        memory = 64
      }
    }
  }
}

# Lists data sets that all nodes share, in a container that can only read them.
#
#   nomad job run examples/jobs/shared-data.nomad.hcl
#   nomad job run -var volume=imagenet -var 'command=["sh", "-c", "head -c 100 /data/labels.csv"]' \
#     examples/jobs/shared-data.nomad.hcl
#
# Needs what the role shared_data mounts (/srv/data) as a host volume of that name (nomad_client_host_volumes). While its
# server is away, a job that has begun stands still, and one that begins fails.

variable "datacenters" {
  type    = list(string)
  default = ["*"]
}

variable "volume" {
  type        = string
  default     = "data"
  description = "Host volume that has the data."
}

variable "image" {
  type    = string
  default = "busybox:1.37"
}

variable "command" {
  type    = list(string)
  default = ["sh", "-c", "ls -l /data && sleep 2"]
}

job "shared-data" {
  type        = "batch"
  datacenters = var.datacenters

  # Nomad takes a job that has ended, and is told once more as it was, for done.
  meta {
    run = uuidv4()
  }

  group "data" {
    volume "data" {
      type      = "host"
      source    = var.volume
      read_only = true
    }

    # A server that is away may come back.
    restart {
      attempts = 3
      delay    = "30s"
      mode     = "fail"
    }

    task "read" {
      driver = "docker"

      config {
        image   = var.image
        command = var.command[0]
        args    = slice(var.command, 1, length(var.command))
      }

      volume_mount {
        volume      = "data"
        destination = "/data"
        read_only   = true
      }

      resources {
        cpu    = 100
        memory = 64
      }
    }
  }
}

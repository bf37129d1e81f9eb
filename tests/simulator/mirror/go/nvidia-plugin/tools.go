//go:build tools

// Package plugin keeps the program in the module graph, so that `go mod tidy` pins what it needs.
package plugin

import _ "github.com/hashicorp/nomad/devices/gpu/nvidia/cmd"

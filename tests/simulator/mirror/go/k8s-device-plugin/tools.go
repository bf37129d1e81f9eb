//go:build tools

// Package plugin keeps the programs in the module graph, so that `go mod tidy` pins what they need: those of NVIDIA's
// chart, of which one is built.
package plugin

import (
	_ "github.com/NVIDIA/k8s-device-plugin/cmd/config-manager"
	_ "github.com/NVIDIA/k8s-device-plugin/cmd/gpu-feature-discovery"
	_ "github.com/NVIDIA/k8s-device-plugin/cmd/mps-control-daemon"
	_ "github.com/NVIDIA/k8s-device-plugin/cmd/nvidia-device-plugin"
)

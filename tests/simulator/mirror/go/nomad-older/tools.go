//go:build tools

// Package nomad keeps the program in the module graph, so that `go mod tidy` pins what it needs.
package nomad

import _ "github.com/hashicorp/nomad"

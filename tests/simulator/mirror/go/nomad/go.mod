module gpufarm.test/nomad

go 1.26

require (
	github.com/hashicorp/nomad v1.11.3
	github.com/hashicorp/nomad/api v0.0.0-20260907080526-08ef8f3d26da
)

// As in Nomad's own go.mod: replace directives of a dependency do not reach the main module.
replace (
	github.com/Microsoft/go-winio => github.com/endocrimes/go-winio v0.4.13-0.20190628114223-fb47a8b41948
	github.com/hashicorp/hcl => github.com/hashicorp/hcl v1.0.1-nomad-1
)

// Ours, not Nomad's: without the clients of clouds.
replace github.com/hashicorp/go-discover => ../go-discover

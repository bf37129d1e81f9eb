module gpufarm.test/nomad

go 1.26

// Libraries as nomad/go.mod has them where the older code takes them, so that what one build has compiled serves the other.
require (
	cel.dev/expr v0.25.1
	cloud.google.com/go v0.123.0
	cloud.google.com/go/auth v0.17.0
	cloud.google.com/go/auth/oauth2adapt v0.2.8
	cloud.google.com/go/compute/metadata v0.9.0
	cloud.google.com/go/iam v1.5.3
	cloud.google.com/go/kms v1.23.0
	cloud.google.com/go/longrunning v0.7.0
	cloud.google.com/go/monitoring v1.24.2
	cloud.google.com/go/storage v1.58.0
	github.com/GoogleCloudPlatform/opentelemetry-operations-go/detectors/gcp v1.30.0
	github.com/GoogleCloudPlatform/opentelemetry-operations-go/exporter/metric v0.54.0
	github.com/GoogleCloudPlatform/opentelemetry-operations-go/internal/resourcemapping v0.54.0
	github.com/apparentlymart/go-cidr v1.1.0
	github.com/aws/aws-sdk-go-v2 v1.41.3
	github.com/aws/aws-sdk-go-v2/config v1.32.11
	github.com/aws/aws-sdk-go-v2/credentials v1.19.11
	github.com/aws/aws-sdk-go-v2/feature/ec2/imds v1.18.19
	github.com/aws/aws-sdk-go-v2/internal/configsources v1.4.19
	github.com/aws/aws-sdk-go-v2/internal/endpoints/v2 v2.7.19
	github.com/aws/aws-sdk-go-v2/internal/ini v1.8.5
	github.com/aws/aws-sdk-go-v2/service/internal/accept-encoding v1.13.6
	github.com/aws/aws-sdk-go-v2/service/internal/presigned-url v1.13.19
	github.com/aws/aws-sdk-go-v2/service/sso v1.30.12
	github.com/aws/aws-sdk-go-v2/service/ssooidc v1.35.16
	github.com/aws/aws-sdk-go-v2/service/sts v1.41.8
	github.com/aws/smithy-go v1.24.2
	github.com/bmatcuk/doublestar v1.3.4
	github.com/cilium/ebpf v0.17.3
	github.com/cncf/xds/go v0.0.0-20251210132809-ee656c7534f5
	github.com/container-storage-interface/spec v1.12.0
	github.com/containerd/console v1.0.5
	github.com/coreos/go-systemd/v22 v22.6.0
	github.com/docker/docker v28.5.2+incompatible
	github.com/envoyproxy/go-control-plane/envoy v1.36.0
	github.com/envoyproxy/protoc-gen-validate v1.3.0
	github.com/go-jose/go-jose/v4 v4.1.3
	github.com/golang-jwt/jwt/v5 v5.3.1
	github.com/google/btree v1.1.3
	github.com/googleapis/enterprise-certificate-proxy v0.3.7
	github.com/googleapis/gax-go/v2 v2.15.0
	github.com/hashicorp/cap v0.12.0
	github.com/hashicorp/consul-template v0.41.4
	github.com/hashicorp/consul/api v1.33.4
	github.com/hashicorp/consul/sdk v0.17.2
	github.com/hashicorp/go-bexpr v0.1.16
	github.com/hashicorp/go-cty-funcs v0.1.0
	github.com/hashicorp/go-getter v1.8.4
	github.com/hashicorp/go-kms-wrapping/v2 v2.0.20
	github.com/hashicorp/go-msgpack/v2 v2.1.5
	github.com/hashicorp/go-secure-stdlib/parseutil v0.2.0
	github.com/hashicorp/go-version v1.8.0
	github.com/hashicorp/mdns v1.0.6
	github.com/hashicorp/memberlist v0.5.4
	github.com/hashicorp/nomad v1.10.5
	github.com/hashicorp/nomad/api v0.0.0-20260907080526-08ef8f3d26da
	github.com/hashicorp/vault/api v1.22.0
	github.com/klauspost/compress v1.18.2
	github.com/miekg/dns v1.1.72
	github.com/moby/sys/user v0.4.0
	github.com/prometheus/client_golang v1.23.2
	github.com/prometheus/common v0.67.5
	github.com/rogpeppe/go-internal v1.14.1
	github.com/spiffe/go-spiffe/v2 v2.6.0
	github.com/vishvananda/netlink v1.3.1
	github.com/vishvananda/netns v0.0.5
	github.com/zclconf/go-cty v1.18.0
	github.com/zclconf/go-cty-yaml v1.2.0
	go.opentelemetry.io/auto/sdk v1.2.1
	go.opentelemetry.io/contrib/detectors/gcp v1.39.0
	go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc v0.63.0
	go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp v0.61.0
	go.opentelemetry.io/otel v1.40.0
	go.opentelemetry.io/otel/metric v1.40.0
	go.opentelemetry.io/otel/sdk v1.40.0
	go.opentelemetry.io/otel/sdk/metric v1.40.0
	go.opentelemetry.io/otel/trace v1.40.0
	go.yaml.in/yaml/v2 v2.4.3
	golang.org/x/crypto v0.48.0
	golang.org/x/exp v0.0.0-20250808145144-a408d31f581a
	golang.org/x/mod v0.33.0
	golang.org/x/net v0.51.0
	golang.org/x/oauth2 v0.34.0
	golang.org/x/sync v0.19.0
	golang.org/x/sys v0.41.0
	golang.org/x/term v0.40.0
	golang.org/x/text v0.34.0
	golang.org/x/time v0.14.0
	google.golang.org/api v0.256.0
	google.golang.org/genproto v0.0.0-20250922171735-9219d122eba9
	google.golang.org/genproto/googleapis/api v0.0.0-20251202230838-ff82c1b0f217
	google.golang.org/genproto/googleapis/rpc v0.0.0-20251202230838-ff82c1b0f217
	google.golang.org/grpc v1.79.2
	google.golang.org/protobuf v1.36.11
)

// As in Nomad's own go.mod: replace directives of a dependency do not reach the main module.
replace (
	github.com/Microsoft/go-winio => github.com/endocrimes/go-winio v0.4.13-0.20190628114223-fb47a8b41948
	github.com/hashicorp/hcl => github.com/hashicorp/hcl v1.0.1-nomad-1
)

// Ours, not Nomad's: without the clients of clouds.
replace github.com/hashicorp/go-discover => ../go-discover

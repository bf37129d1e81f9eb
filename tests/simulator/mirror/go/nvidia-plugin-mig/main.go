// A double of HashiCorp's NVIDIA device plugin in a version that knows MIG: what Nomad sees of it is that plugin's,
// and where that plugin asks NVML, this one asks the node's nvidia-smi. README.md of the mirror says what is recorded.
package main

import (
	"context"
	"fmt"
	"os"
	"sort"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/nomad/plugins/base"
	"github.com/hashicorp/nomad/plugins/device"
	"github.com/hashicorp/nomad/plugins/shared/hclspec"
	"github.com/hashicorp/nomad/plugins/shared/structs"
)

const (
	name           = "nvidia-gpu"
	vendor         = "nvidia"
	visibleDevices = "NVIDIA_VISIBLE_DEVICES"
)

// version comes from the build.
var version string

// settings are those of the agent's block "nomad-device-nvidia", which fits a program by its file name.
type settings struct {
	Enabled           bool     `codec:"enabled"`
	IgnoredGPUIDs     []string `codec:"ignored_gpu_ids"`
	FingerprintPeriod string   `codec:"fingerprint_period"`
}

func setting(key, kind, fallback string) *hclspec.Spec {
	return hclspec.NewDefault(hclspec.NewAttr(key, kind, false), hclspec.NewLiteral(fallback))
}

type plugin struct {
	log hclog.Logger
	// The GPUs of the start, or why there are none: NVML is asked for both once in the life of a program.
	atStart  map[string]bool
	startErr error

	enabled bool
	ignored map[string]bool
	period  time.Duration

	lock    sync.RWMutex
	offered map[string]bool
}

func main() {
	log := hclog.New(&hclog.LoggerOptions{Level: hclog.Trace, JSONFormat: true, Output: os.Stderr})
	device.Serve(start(log.Named(name)), log)
}

func start(log hclog.Logger) *plugin {
	started := &plugin{log: log, atStart: map[string]bool{}, ignored: map[string]bool{}, offered: map[string]bool{}}
	gpus, err := list()
	if err != nil {
		log.Error("nvidia-smi does not answer at the start, and is not asked again", "error", err)
		started.startErr = err
	}
	for _, gpu := range gpus {
		started.atStart[gpu.uuid] = true
	}
	return started
}

// PluginInfo tells what the plugin is.
func (p *plugin) PluginInfo() (*base.PluginInfoResponse, error) {
	return &base.PluginInfoResponse{
		Type:              base.PluginTypeDevice,
		PluginApiVersions: []string{device.ApiVersion010},
		PluginVersion:     version,
		Name:              name,
	}, nil
}

// ConfigSchema tells which settings there are.
func (p *plugin) ConfigSchema() (*hclspec.Spec, error) {
	return hclspec.NewObject(map[string]*hclspec.Spec{
		"enabled":            setting("enabled", "bool", "true"),
		"ignored_gpu_ids":    setting("ignored_gpu_ids", "list(string)", "[]"),
		"fingerprint_period": setting("fingerprint_period", "string", `"1m"`),
	}), nil
}

// SetConfig takes the settings.
func (p *plugin) SetConfig(given *base.Config) error {
	var wanted settings
	if len(given.PluginConfig) > 0 {
		if err := base.MsgPackDecode(given.PluginConfig, &wanted); err != nil {
			return err
		}
	}
	period, err := time.ParseDuration(wanted.FingerprintPeriod)
	if err != nil {
		return fmt.Errorf("fingerprint_period is %q, which is no duration: %w", wanted.FingerprintPeriod, err)
	}
	p.enabled, p.period = wanted.Enabled, period
	for _, uuid := range wanted.IgnoredGPUIDs {
		p.ignored[uuid] = true
	}
	return nil
}

// each calls ask at once and then every interval, until nobody listens any more.
func each(ctx context.Context, interval time.Duration, ask func()) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
			timer.Reset(interval)
			ask()
		}
	}
}

// Fingerprint sends the devices now, and again when others are there.
func (p *plugin) Fingerprint(ctx context.Context) (<-chan *device.FingerprintResponse, error) {
	if !p.enabled {
		return nil, device.ErrPluginDisabled
	}
	answers := make(chan *device.FingerprintResponse)
	send := func(answer *device.FingerprintResponse) {
		select {
		case answers <- answer:
		case <-ctx.Done():
		}
	}
	go func() {
		defer close(answers)
		if p.startErr != nil {
			send(device.NewFingerprintError(p.startErr))
			return
		}
		each(ctx, p.period, func() {
			found, err := devices(p.atStart)
			if err != nil {
				// Nomad takes all devices away at that, and asks no more until its agent starts again.
				p.log.Error("the devices cannot be told", "error", err)
				send(device.NewFingerprintError(err))
			} else if kept := p.without(found); p.offer(kept) {
				send(device.NewFingerprint(groups(kept)...))
			}
		})
	}()
	return answers, nil
}

func (p *plugin) without(found []seen) []seen {
	var kept []seen
	for _, each := range found {
		if !p.ignored[each.uuid] {
			kept = append(kept, each)
		}
	}
	return kept
}

// offer keeps what can be reserved from now on, and tells whether that is something else. Attributes do not count.
func (p *plugin) offer(kept []seen) bool {
	now := map[string]bool{}
	for _, each := range kept {
		now[each.uuid] = true
	}
	p.lock.Lock()
	defer p.lock.Unlock()
	changed := len(now) != len(p.offered)
	for uuid := range now {
		changed = changed || !p.offered[uuid]
	}
	p.offered = now
	return changed
}

// groups puts devices of one name together. Their attributes are those of the one whose UUID comes first.
func groups(found []seen) []*device.DeviceGroup {
	sort.Slice(found, func(a, b int) bool { return found[a].uuid < found[b].uuid })
	var all []*device.DeviceGroup
	byName := map[string]*device.DeviceGroup{}
	for _, each := range found {
		group := byName[each.name]
		if group == nil {
			group = &device.DeviceGroup{
				Vendor: vendor, Type: device.DeviceTypeGPU, Name: each.name, Attributes: each.attributes,
			}
			byName[each.name], all = group, append(all, group)
		}
		group.Devices = append(group.Devices, &device.Device{
			ID:         each.uuid,
			Healthy:    true, // whatever becomes of it
			HwLocality: &device.DeviceLocality{PciBusID: each.busID},
		})
	}
	return all
}

// Reserve tells what a task needs that gets these devices.
func (p *plugin) Reserve(uuids []string) (*device.ContainerReservation, error) {
	if len(uuids) == 0 {
		return &device.ContainerReservation{}, nil
	}
	if !p.enabled {
		return nil, device.ErrPluginDisabled
	}
	p.lock.RLock()
	defer p.lock.RUnlock()
	var gone []string
	for _, uuid := range uuids {
		if !p.offered[uuid] {
			gone = append(gone, uuid)
		}
	}
	if gone != nil {
		return nil, fmt.Errorf("unknown device IDs: %s", strings.Join(gone, ","))
	}
	return &device.ContainerReservation{Envs: map[string]string{visibleDevices: strings.Join(uuids, ",")}}, nil
}

// Stats sends the state of whole GPUs each interval. MIG devices have none, and a node that has nothing else sends
// answers without groups.
func (p *plugin) Stats(ctx context.Context, interval time.Duration) (<-chan *device.StatsResponse, error) {
	if !p.enabled {
		return nil, device.ErrPluginDisabled
	}
	answers := make(chan *device.StatsResponse)
	send := func(answer *device.StatsResponse) {
		select {
		case answers <- answer:
		case <-ctx.Done():
		}
	}
	go func() {
		defer close(answers)
		if p.startErr != nil {
			send(device.NewStatsError(p.startErr))
			return
		}
		each(ctx, interval, func() {
			found, err := states()
			if err != nil {
				p.log.Error("the statistics cannot be told", "error", err)
				send(device.NewStatsError(err))
				return
			}
			send(&device.StatsResponse{Groups: p.statistics(found, time.Now())})
		})
	}()
	return answers, nil
}

func (p *plugin) statistics(found []state, at time.Time) []*device.DeviceGroupStats {
	p.lock.RLock()
	defer p.lock.RUnlock()
	var all []*device.DeviceGroupStats
	byName := map[string]*device.DeviceGroupStats{}
	for _, each := range found {
		if !p.offered[each.uuid] {
			continue
		}
		group := byName[each.name]
		if group == nil {
			group = &device.DeviceGroupStats{
				Vendor: vendor, Type: device.DeviceTypeGPU, Name: each.name,
				InstanceStats: map[string]*device.DeviceStats{},
			}
			byName[each.name], all = group, append(all, group)
		}
		memory := &structs.StatValue{
			Unit: "MiB", Desc: "UsedMemory / TotalMemory",
			IntNumeratorVal: &each.memoryUsed, IntDenominatorVal: &each.memoryTotal,
		}
		group.InstanceStats[each.uuid] = &device.DeviceStats{
			Summary: memory,
			Stats: &structs.StatObject{Attributes: map[string]*structs.StatValue{
				"Memory state":    memory,
				"GPU utilization": {Unit: "%", IntNumeratorVal: &each.utilization},
				"Temperature":     {Unit: "C", IntNumeratorVal: &each.temperature},
			}},
			Timestamp: at,
		}
	}
	return all
}

package main

import (
	"encoding/csv"
	"encoding/xml"
	"errors"
	"fmt"
	"math"
	"os/exec"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"github.com/hashicorp/nomad/plugins/shared/structs"
)

// seen is a device: a whole GPU, or a MIG device of one.
type seen struct {
	uuid, name, busID string
	attributes        map[string]*structs.Attribute
}

// listed is a GPU of `nvidia-smi -L`, which alone has the UUIDs and names of MIG devices.
type listed struct {
	uuid, name string
	parts      map[string]part // by their index
}

type part struct{ uuid, profile string }

// state is what statistics tell of a GPU.
type state struct {
	uuid, name                                        string
	divided                                           bool
	memoryUsed, memoryTotal, utilization, temperature int64
}

// full is what is asked for in `nvidia-smi -q -x`.
type full struct {
	Driver string    `xml:"driver_version"`
	GPUs   []fullGPU `xml:"gpu"`
}

type fullGPU struct {
	Name            string `xml:"product_name"`
	UUID            string `xml:"uuid"`
	DisplayAttached string `xml:"display_attached"`
	Persistence     string `xml:"persistence_mode"`
	MIGMode         string `xml:"mig_mode>current_mig"`
	Parts           []struct {
		Index  string `xml:"index"`
		Memory string `xml:"fb_memory_usage>total"`
	} `xml:"mig_devices>mig_device"`
	BusID     string `xml:"pci>pci_bus_id"`
	LinkGen   string `xml:"pci>pci_gpu_link_info>pcie_gen>max_link_gen"`
	LinkWidth string `xml:"pci>pci_gpu_link_info>link_widths>max_link_width"`
	Memory    string `xml:"fb_memory_usage>total"`
	BAR1      string `xml:"bar1_memory_usage>total"`
	Power     string `xml:"gpu_power_readings>average_power_draw"`
	Graphics  string `xml:"clocks>graphics_clock"`
	MemClock  string `xml:"clocks>mem_clock"`
}

var (
	gpuLine  = regexp.MustCompile(`^GPU \d+: (.+) \(UUID: (\S+)\)$`)
	partLine = regexp.MustCompile(`^ +MIG (\S+) +Device +(\d+): \(UUID: (\S+)\)$`)
	number   = regexp.MustCompile(`^\d+(?:\.\d+)?`)

	errMoved   = errors.New("nvidia-smi -L and -q -x do not tell of the same devices")
	errUnknown = errors.New("not supported")
)

// smi asks nvidia-smi, which says on its standard output why it fails. One that hangs keeps the caller, as NVML would.
func smi(arguments ...string) (string, error) {
	// The child is to end with this program, which Linux ties to the thread that started it.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	command := exec.Command("nvidia-smi", arguments...)
	command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	output, err := command.Output()
	if err != nil {
		said := strings.Join(strings.Fields(string(output)), " ")
		return "", fmt.Errorf("nvidia-smi %s: %w: %s", strings.Join(arguments, " "), err, said)
	}
	return string(output), nil
}

func list() ([]listed, error) {
	output, err := smi("-L")
	if err != nil {
		return nil, err
	}
	var gpus []listed
	for _, line := range strings.Split(strings.TrimRight(output, "\n"), "\n") {
		if found := gpuLine.FindStringSubmatch(line); found != nil {
			gpus = append(gpus, listed{uuid: found[2], name: found[1], parts: map[string]part{}})
		} else if found := partLine.FindStringSubmatch(line); found != nil && gpus != nil {
			gpus[len(gpus)-1].parts[found[2]] = part{uuid: found[3], profile: found[1]}
		} else {
			return nil, fmt.Errorf("nvidia-smi -L says %q", line)
		}
	}
	return gpus, nil
}

// devices tells what there is on the GPUs of the start, all of it or an error. Between its two questions a layout may
// change, for which NVML leaves much less time.
func devices(atStart map[string]bool) ([]seen, error) {
	var found []seen
	err := errMoved
	for attempt := 0; attempt < 3 && errors.Is(err, errMoved); attempt++ {
		found, err = devicesOnce(atStart)
	}
	return found, err
}

func devicesOnce(atStart map[string]bool) ([]seen, error) {
	gpus, err := list()
	if err != nil {
		return nil, err
	}
	output, err := smi("-q", "-x")
	if err != nil {
		return nil, err
	}
	var all full
	if err := xml.Unmarshal([]byte(output), &all); err != nil {
		return nil, fmt.Errorf("nvidia-smi -q -x: %w", err)
	}
	details := map[string]fullGPU{}
	for _, gpu := range all.GPUs {
		details[gpu.UUID] = gpu
	}
	var found []seen
	for _, gpu := range gpus {
		if !atStart[gpu.uuid] {
			continue
		}
		detail, ok := details[gpu.uuid]
		if !ok || len(detail.Parts) != len(gpu.parts) {
			return nil, errMoved
		}
		if detail.MIGMode != "Enabled" {
			whole, err := detail.device(gpu.uuid, gpu.name, detail.Memory, all.Driver)
			if err != nil {
				return nil, err
			}
			found = append(found, whole)
			continue
		}
		for _, each := range detail.Parts {
			of, ok := gpu.parts[each.Index]
			if !ok {
				return nil, errMoved
			}
			one, err := detail.device(of.uuid, gpu.name+" MIG "+of.profile, each.Memory, all.Driver)
			if err != nil {
				return nil, err
			}
			found = append(found, one)
		}
	}
	return found, nil
}

// device tells of the GPU, or of a part of it: that has a name and memory of its own, and all else from the GPU.
func (g fullGPU) device(uuid, name, memory, driver string) (seen, error) {
	var wrong []error
	needed := func(what, text string) int64 {
		value, known, err := whole(text)
		if err == nil && !known {
			err = errUnknown
		}
		if err != nil {
			wrong = append(wrong, fmt.Errorf("%s of %s: %w", what, g.UUID, err))
		}
		return value
	}
	optional := func(what, text string) *int64 {
		value, known, err := whole(text)
		if err != nil {
			wrong = append(wrong, fmt.Errorf("%s of %s: %w", what, g.UUID, err))
		}
		if !known {
			return nil
		}
		return &value
	}
	orZero := func(what, text string) int64 {
		if value := optional(what, text); value != nil {
			return *value
		}
		return 0
	}
	flag := func(what, text, on, off string) string {
		switch text {
		case on:
			return "1"
		case off:
			return "0"
		}
		wrong = append(wrong, fmt.Errorf("%s of %s is %q", what, g.UUID, text))
		return ""
	}
	attributes := map[string]*structs.Attribute{
		"driver_version":   {String: &driver},
		"display_state":    text(flag("display state", g.DisplayAttached, "Yes", "No")),
		"persistence_mode": text(flag("persistence mode", g.Persistence, "Enabled", "Disabled")),
		"memory":           amount(needed("memory", memory), structs.UnitMiB),
		// What it draws at that time, not what it may draw.
		"power":         amount(orZero("power", g.Power), structs.UnitW),
		"cores_clock":   amount(needed("cores clock", g.Graphics), structs.UnitMHz),
		"pci_bandwidth": amount(lane(orZero("link", g.LinkGen))*orZero("link", g.LinkWidth), structs.UnitMBPerS),
	}
	if value := optional("BAR1 memory", g.BAR1); value != nil {
		attributes["bar1"] = amount(*value, structs.UnitMiB)
	}
	if value := optional("memory clock", g.MemClock); value != nil {
		attributes["memory_clock"] = amount(*value, structs.UnitMHz)
	}
	return seen{uuid: uuid, name: name, busID: cArray(g.BusID), attributes: attributes}, errors.Join(wrong...)
}

// states tells of all GPUs, or of none.
func states() ([]state, error) {
	const fields = "uuid,mig.mode.current,memory.used,memory.total,utilization.gpu,temperature.gpu,name"
	output, err := smi("--query-gpu="+fields, "--format=csv,noheader,nounits")
	if err != nil {
		return nil, err
	}
	reader := csv.NewReader(strings.NewReader(output))
	reader.TrimLeadingSpace = true
	reader.FieldsPerRecord = strings.Count(fields, ",") + 1
	lines, err := reader.ReadAll()
	if err != nil {
		return nil, fmt.Errorf("nvidia-smi --query-gpu: %w", err)
	}
	var all []state
	for _, line := range lines {
		gpu := state{uuid: line[0], divided: line[1] == "Enabled", name: line[6]}
		for at, value := range []*int64{&gpu.memoryUsed, &gpu.memoryTotal, &gpu.utilization, &gpu.temperature} {
			found, known, err := whole(line[at+2])
			// A GPU without a sensor of temperature has 0; one that cannot tell the rest spoils the answer.
			if err == nil && !known && value != &gpu.temperature {
				err = errUnknown
			}
			if err != nil && !gpu.divided {
				return nil, fmt.Errorf("statistics of %s: %w", gpu.uuid, err)
			}
			*value = found
		}
		all = append(all, gpu)
	}
	return all, nil
}

// whole reads "81920 MiB", "67.03 W" or "16x" in whole units, and tells whether there was a value at all.
func whole(text string) (int64, bool, error) {
	if bare := strings.Trim(text, "[]"); bare == "N/A" || bare == "Not Supported" {
		return 0, false, nil
	}
	value, err := strconv.ParseFloat(number.FindString(text), 64)
	if err != nil {
		return 0, false, fmt.Errorf("nvidia-smi says %q", text)
	}
	return int64(math.Floor(value)), true, nil
}

// lane is the MB/s of one lane, as the real plugin has them.
func lane(generation int64) int64 {
	return map[int64]int64{3: 1 << 10, 4: 2 << 10, 5: 3 << 10, 6: 4 << 10}[generation]
}

// cArray is how NVML holds a bus ID, and the real plugin hands it on.
func cArray(text string) string {
	var array [32]byte
	copy(array[:], text)
	return string(array[:])
}

func amount(value int64, unit string) *structs.Attribute {
	return &structs.Attribute{Int: &value, Unit: unit}
}

func text(value string) *structs.Attribute {
	return &structs.Attribute{String: &value}
}

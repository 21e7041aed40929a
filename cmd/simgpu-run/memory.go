package main

import (
	"fmt"
	"math"
	"math/big"
	"regexp"
	"strings"
)

// amount is memory as a person writes it: a size, or a share of the device.
type amount struct {
	bytes int64    // where share is nil
	share *big.Rat // of the device's memory, from 0 to 1
}

// of is the amount in bytes on a device with that much memory.
func (a amount) of(total int64) int64 {
	if a.share == nil {
		return a.bytes
	}
	bytes := new(big.Rat).Mul(a.share, new(big.Rat).SetInt64(total))
	return new(big.Int).Quo(bytes.Num(), bytes.Denom()).Int64()
}

// memoryPattern is a decimal number and a unit. The length is bounded, so that the
// exact arithmetic is.
var memoryPattern = regexp.MustCompile(`^([0-9]{1,19}(?:\.[0-9]{1,9})?) ?([A-Za-z]*|%)$`)

// unitBytes is the size of a unit in lower case. As everywhere in Kubernetes and
// CUDA, Mi is binary and M is decimal.
func unitBytes(unit string) (int64, bool) {
	if unit == "" || unit == "b" {
		return 1, true
	}
	const prefixes = "kmgt"
	power := strings.IndexByte(prefixes, unit[0]) + 1
	base := int64(0)
	switch unit[1:] {
	case "", "b":
		base = 1000
	case "i", "ib":
		base = 1024
	}
	if power == 0 || base == 0 {
		return 0, false
	}
	size := int64(1)
	for range power {
		size *= base
	}
	return size, true
}

// parseAmount reads 15023MiB, 14.5GiB, 15GB, 15752757248 or 90%.
func parseAmount(text string) (amount, error) {
	match := memoryPattern.FindStringSubmatch(strings.TrimSpace(text))
	if match == nil {
		return amount{}, fmt.Errorf("memory %q: want a number and a unit, for instance 15023MiB, 14.5GiB, 15GB or 90%%", text)
	}
	number, ok := new(big.Rat).SetString(match[1])
	if !ok {
		return amount{}, fmt.Errorf("memory %q: not a number", text)
	}
	if match[2] == "%" {
		share := number.Quo(number, big.NewRat(100, 1))
		if share.Cmp(big.NewRat(1, 1)) > 0 {
			return amount{}, fmt.Errorf("memory %q: a device has only 100%%", text)
		}
		return amount{share: share}, nil
	}
	size, ok := unitBytes(strings.ToLower(match[2]))
	if !ok {
		return amount{}, fmt.Errorf("memory %q: unit %q is not known, use B, KiB, MiB, GiB, TiB, kB, MB, GB, TB or %%", text, match[2])
	}
	bytes := number.Mul(number, new(big.Rat).SetInt64(size))
	whole := new(big.Int).Quo(bytes.Num(), bytes.Denom())
	if !whole.IsInt64() || whole.Int64() > math.MaxInt64/2 {
		return amount{}, fmt.Errorf("memory %q: out of range", text)
	}
	return amount{bytes: whole.Int64()}, nil
}

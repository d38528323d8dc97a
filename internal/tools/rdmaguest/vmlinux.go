//go:build linux

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
)

// unpackKernel takes the kernel itself out of a bzImage that is packed by xz. QEMU boots
// it as it is, and the emulated processor need not unpack it: seconds of each boot.
func unpackKernel(ctx context.Context, image, to string) error {
	b, err := os.ReadFile(image)
	if err != nil {
		return err
	}
	payload, err := kernelPayload(b)
	if err != nil {
		return fmt.Errorf("%s: %w", image, err)
	}
	packed := to + ".xz"
	if err := os.WriteFile(packed, payload, 0o644); err != nil {
		return err
	}
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	// What follows the stream is the kernel's size, for the unpacker in the image.
	cmd := exec.CommandContext(ctx, "xz", "--decompress", "--stdout", "--single-stream", packed)
	cmd.Stdout, cmd.Stderr = out, os.Stderr
	if err := errors.Join(cmd.Run(), out.Close()); err != nil {
		return fmt.Errorf("unpack %s: %w", image, err)
	}
	return os.Remove(packed)
}

// Offsets in the header of a bzImage: Documentation/x86/boot.rst of the kernel.
const (
	setupSectors  = 0x1f1
	bootMagic     = 0x202
	bootProtocol  = 0x206
	payloadOffset = 0x248
	payloadLength = 0x24c
	headerEnd     = 0x250
)

var errNotXZ = errors.New("not packed by xz")

// kernelPayload is a part of image, and starts with an xz stream.
func kernelPayload(image []byte) ([]byte, error) {
	if len(image) < headerEnd || string(image[bootMagic:bootMagic+4]) != "HdrS" {
		return nil, errors.New("no Linux boot image: its header has no magic HdrS")
	}
	if v := binary.LittleEndian.Uint16(image[bootProtocol:]); v < 0x208 {
		return nil, fmt.Errorf("boot protocol %#x: want at least 0x208, which says where the kernel lies", v)
	}
	sectors := uint64(image[setupSectors])
	if sectors == 0 {
		sectors = 4
	}
	start := (sectors+1)*512 + uint64(binary.LittleEndian.Uint32(image[payloadOffset:]))
	end := start + uint64(binary.LittleEndian.Uint32(image[payloadLength:]))
	if end > uint64(len(image)) {
		return nil, fmt.Errorf("the kernel lies at bytes %d to %d of an image of %d", start, end, len(image))
	}
	payload := image[start:end]
	if len(payload) < 6 || string(payload[:6]) != "\xfd7zXZ\x00" {
		return nil, errNotXZ
	}
	return payload, nil
}

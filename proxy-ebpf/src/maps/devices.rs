//! The agent's row of each device. No reference leaves this file.

use proxy_common::device::Device;

use super::{DEVICES, Find, copied};

#[inline(always)]
pub fn device(ifindex: u32) -> Option<Device> {
    copied(&DEVICES, &ifindex)
}

/// The flags of a device, and the interface index of its bridge; 0 where there is none of either.
#[inline(always)]
pub fn place_of(ifindex: u32) -> (u32, u32) {
    DEVICES.find(&ifindex).map_or((0, 0), |device| device.read(|device| (device.flags(), device.bridge)))
}

/// Returns true if other devices of ours are below this one.
#[inline(always)]
pub fn is_stacked(ifindex: u32) -> bool {
    DEVICES.find(&ifindex).is_some_and(|device| device.read(Device::flags) & Device::EDGE == 0)
}

/// The longest IP packet that leaves a device whole, in bytes; 0 if unknown.
#[inline(always)]
pub fn mtu_of(ifindex: u32) -> u32 {
    DEVICES.find(&ifindex).map_or(0, |device| device.read(|device| device.mtu))
}

/// The address of frames that the host takes in at a device.
#[inline(always)]
pub fn mac_of(ifindex: u32) -> Option<[u8; 6]> {
    DEVICES.find(&ifindex).map(|device| device.read(|device| device.mac))
}

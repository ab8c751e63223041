//! The agent's row of each device. No reference leaves this file.

use proxy_common::device::Device;

use super::{DEVICES, Find, Maps, copied};
use crate::setting::ZERO;

#[inline(always)]
pub fn device(ifindex: u32) -> Option<Device> {
    copied(&DEVICES, &ifindex)
}

/// Returns a device's own address, if it has one.
#[inline(always)]
pub fn address_of<A: Maps>(ifindex: u32) -> Option<A> {
    let own = DEVICES.find(&ifindex)?.read(|device| A::of_device(device));
    (!own.is_unspecified()).then_some(own)
}

/// Returns the flags of a device (0: unknown device), and the interface index of its bridge (0:
/// none).
#[inline(always)]
pub fn place_of(ifindex: u32) -> (u32, u32) {
    DEVICES.find(&ifindex).map_or((0, 0), |device| {
        device.read(|device| (device.flags(), device.bridge))
    })
}

/// Returns true if the device is above other devices with hooks.
#[inline(always)]
pub fn is_stacked(ifindex: u32) -> bool {
    DEVICES
        .find(&ifindex)
        .is_some_and(|device| device.read(Device::flags) & Device::EDGE == 0)
}

/// Returns the longest IP packet that leaves the device unfragmented, in bytes; 0 if unknown.
#[inline(always)]
pub fn mtu_of(ifindex: u32) -> u32 {
    DEVICES
        .find(&ifindex)
        .map_or(0, |device| device.read(|device| device.mtu))
}

/// Returns the interface index of the tunnel device for packets of a family; 0 if there is none.
#[inline(always)]
pub fn tunnel(is_v4: bool) -> u32 {
    // On the stack: the compiler would merge a constant key with a setting of the same default, which
    // the loader changes.
    let key = Device::TUNNELS + ZERO.get() as u32;
    DEVICES
        .find(&key)
        .map_or(0, |device| device.read(|device| device.tunnel(is_v4)))
}

/// Returns the MAC address of frames that the host accepts at the device.
#[inline(always)]
pub fn mac_of(ifindex: u32) -> Option<[u8; 6]> {
    DEVICES
        .find(&ifindex)
        .map(|device| device.read(|device| device.mac))
}

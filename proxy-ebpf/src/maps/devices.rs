//! The agent's row of each device. No reference leaves this file.

use proxy_common::device::Device;

use super::{DEVICES, Find, copied};
use crate::net::Net;

#[inline(always)]
pub fn device(ifindex: u32) -> Option<Device> {
    copied(&DEVICES, &ifindex)
}

/// The address with which the host speaks through a device: the one that the kernel's route names,
/// else the device's own. None if the device has no address: the kernel would take one of any other
/// device then.
#[inline(always)]
pub fn address_at<A: Net>(ifindex: u32, by_route: &A) -> Option<A> {
    let own = DEVICES.find(&ifindex)?.read(|device| A::of_device(device));
    if own.is_unspecified() {
        return None;
    }
    Some(if by_route.is_unicast() {
        *by_route
    } else {
        own
    })
}

/// The flags of a device, and the interface index of its bridge; 0 where there is none of either.
#[inline(always)]
pub fn place_of(ifindex: u32) -> (u32, u32) {
    DEVICES.find(&ifindex).map_or((0, 0), |device| {
        device.read(|device| (device.flags(), device.bridge))
    })
}

/// Returns true if other devices of ours are below this one.
#[inline(always)]
pub fn is_stacked(ifindex: u32) -> bool {
    DEVICES
        .find(&ifindex)
        .is_some_and(|device| device.read(Device::flags) & Device::EDGE == 0)
}

/// The longest IP packet that leaves a device whole, in bytes; 0 if unknown.
#[inline(always)]
pub fn mtu_of(ifindex: u32) -> u32 {
    DEVICES
        .find(&ifindex)
        .map_or(0, |device| device.read(|device| device.mtu))
}

/// The address of frames that the host takes in at a device.
#[inline(always)]
pub fn mac_of(ifindex: u32) -> Option<[u8; 6]> {
    DEVICES
        .find(&ifindex)
        .map(|device| device.read(|device| device.mac))
}

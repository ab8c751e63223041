//! Moves TCP flows that bypass the network stack back to the stack.

use std::net::SocketAddr;

use anyhow::{Context, Result};
use proxy_common::addr::{Addr4, Addr6, Proto};
use proxy_common::flow::{Flow, FlowKey, Kind, Seen, State};

use crate::flows::{FlowMaps, read};
use crate::lost_flows::{BPF_EXIST, Family};
use crate::maps::FamilyNames;

/// A scan of the flow tables for bypass TCP flows.
pub struct BypassFlows {
    v4: Family<Addr4>,
    v6: Family<Addr6>,
}

/// A bypass TCP flow, by its original entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BypassFlow {
    pub client: SocketAddr,
    pub backend: SocketAddr,
    /// True if the backend is a pod on another node.
    pub is_far: bool,
    pub state: State,
    key: Key,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Key {
    V4(FlowKey<Addr4>),
    V6(FlowKey<Addr6>),
}

impl FlowMaps {
    /// Returns a scan for bypass flows that is independent of the sweep.
    pub fn bypass(&self) -> Result<BypassFlows> {
        Ok(BypassFlows {
            v4: Family::new(&self.tables.v4)?,
            v6: Family::new(&self.tables.v6)?,
        })
    }
}

impl BypassFlows {
    pub fn find(&mut self, picks: impl Fn(&BypassFlow) -> bool) -> Result<Vec<BypassFlow>> {
        let mut found = Vec::new();
        self.v4.find_bypass(Key::V4, &picks, &mut found)?;
        self.v6.find_bypass(Key::V6, &picks, &mut found)?;
        Ok(found)
    }

    /// Moves a bypass flow to the network stack. If a program changes an entry at the same time,
    /// its change or this change may be lost: scan again.
    pub fn leave(&mut self, flow: &BypassFlow) -> Result<()> {
        match &flow.key {
            Key::V4(key) => self.v4.leave(key),
            Key::V6(key) => self.v6.leave(key),
        }
    }
}

impl<A: FamilyNames> Family<A> {
    fn find_bypass(
        &mut self,
        of: impl Fn(FlowKey<A>) -> Key,
        picks: impl Fn(&BypassFlow) -> bool,
        found: &mut Vec<BypassFlow>,
    ) -> Result<()> {
        self.walk.restart();
        while let Some(batch) = self
            .walk
            .next_batch()
            .with_context(|| format!("read {}", A::MAPS.flows))?
        {
            let is_bypass = |key: &FlowKey<A>, flow: &Flow<A>| {
                key.proto() == Proto::TCP && flow.kind == Kind::DNAT && flow.rx.has(Seen::BYPASS)
            };
            let flows = batch
                .filter(|(key, flow)| is_bypass(key, flow))
                .map(|(key, flow)| BypassFlow {
                    client: flow.client_between().socket_addr(),
                    backend: flow.backend.socket_addr(),
                    is_far: flow.is_bypass_far(),
                    state: flow.state(),
                    key: of(key),
                });
            found.extend(flows.filter(&picks));
        }
        Ok(())
    }

    /// Changes the reply entry first, because programs refresh the original entry from it.
    fn leave(&mut self, key: &FlowKey<A>) -> Result<()> {
        let Some(opener) = self.read(key)? else {
            return Ok(());
        };
        for kind in [Kind::UNDNAT, Kind::DNAT] {
            let key = opener.key_as(kind, Proto::TCP);
            let Some(mut entry) = self.read(&key)?.filter(|entry| entry.rx.has(Seen::BYPASS))
            else {
                continue;
            };
            entry.leave_to_stack();
            // A program may have removed the flow.
            let _there = self.flows.insert(key, entry, BPF_EXIST);
        }
        Ok(())
    }

    fn read(&self, key: &FlowKey<A>) -> Result<Option<Flow<A>>> {
        read(&self.flows, key).with_context(|| format!("read {}", A::MAPS.flows))
    }
}

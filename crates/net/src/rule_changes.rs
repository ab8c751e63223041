//! Receives notifications about changes to nftables rules, IPsec policies and routing rules.
//!
//! A notification causes an immediate check. Periodic checks remain necessary, because legacy
//! iptables sends no notifications and the kernel drops notifications when memory is short.

use std::future::pending;

use anyhow::{Context, Result, bail};
use futures::channel::mpsc::UnboundedReceiver;
use futures::future::select_all;
use futures::{FutureExt, StreamExt};
use netlink_packet_core::NetlinkMessage;
use rtnetlink::proto::{Connection, new_connection};
use rtnetlink::sys::protocols::{NETLINK_NETFILTER, NETLINK_ROUTE, NETLINK_XFRM};
use rtnetlink::sys::{AsyncSocket, SocketAddr};
use socket2::{SockFilter, SockRef};
use tracing::debug;

use super::raw::Message;

/// The netlink families with their groups (linux/netfilter/nfnetlink.h, linux/xfrm.h,
/// linux/rtnetlink.h).
const GROUPS: [(isize, &[u32]); 3] = [
    (NETLINK_NETFILTER, &[NFNLGRP_NFTABLES]),
    (NETLINK_XFRM, &[XFRMNLGRP_POLICY]),
    (NETLINK_ROUTE, &[RTNLGRP_IPV4_RULE, RTNLGRP_IPV6_RULE]),
];
const NFNLGRP_NFTABLES: u32 = 7;
const XFRMNLGRP_POLICY: u32 = 4;
const RTNLGRP_IPV4_RULE: u32 = 8;
const RTNLGRP_IPV6_RULE: u32 = 19;

/// The last message of each nftables transaction. The messages before it carry all changed rules.
const NFT_MSG_NEWGEN: u16 = 0x0a0f;

pub(crate) struct RuleChanges(Vec<Heard>);

struct Heard {
    connection: Connection<Message>,
    messages: UnboundedReceiver<(NetlinkMessage<Message>, SocketAddr)>,
}

impl RuleChanges {
    /// Subscribes to the notifications that this kernel supports.
    pub(crate) fn subscribe() -> Self {
        let heard = GROUPS.iter().filter_map(|(protocol, groups)| {
            let heard = Heard::open(*protocol, groups);
            heard
                .inspect_err(|error| debug!("no news of rules, protocol {protocol}: {error:#}"))
                .ok()
        });
        Self(heard.collect())
    }

    /// Waits until a rule changes. Cancel-safe.
    pub(crate) async fn next(&mut self) {
        if self.0.is_empty() {
            return pending().await;
        }
        let (heard, nth, _) = select_all(self.0.iter_mut().map(|heard| heard.next().boxed())).await;
        if let Err(error) = heard {
            debug!("no more news of rules: {error:#}");
            self.0.remove(nth);
        }
    }
}

impl Heard {
    fn open(protocol: isize, groups: &[u32]) -> Result<Self> {
        let (mut connection, _, messages) =
            new_connection(protocol).context("open a netlink socket")?;
        let socket = connection.socket_mut().socket_mut();
        if protocol == NETLINK_NETFILTER {
            SockRef::from(&*socket)
                .attach_filter(&only(NFT_MSG_NEWGEN))
                .context("attach a filter")?;
        }
        // The kernel notifies only sockets with an address. A first send would assign an address,
        // but this socket never sends. An address assigned after subscribing removes the groups.
        socket.bind_auto().context("get an address")?;
        groups
            .iter()
            .try_for_each(|group| socket.add_membership(*group))
            .context("subscribe")?;
        Ok(Self {
            connection,
            messages,
        })
    }

    /// Waits for messages and reads all queued messages.
    async fn next(&mut self) -> Result<()> {
        tokio::select! {
            message = self.messages.next() => drop(message.context("the socket has closed")?),
            () = &mut self.connection => bail!("the socket has failed"),
        }
        while let Some(Some(_)) = self.messages.next().now_or_never() {}
        Ok(())
    }
}

/// Returns a filter that accepts only netlink messages of this type. The type follows the four-byte
/// length; the filter reads the type in network byte order (linux/filter.h).
fn only(kind: u16) -> [SockFilter; 4] {
    const LOAD_HALF_WORD: u16 = 0x28;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    let as_read = u16::from_be_bytes(kind.to_ne_bytes());
    [
        SockFilter::new(LOAD_HALF_WORD, 0, 0, 4),
        SockFilter::new(JUMP_IF_EQUAL, 0, 1, as_read.into()),
        SockFilter::new(RETURN, 0, 0, u32::MAX),
        SockFilter::new(RETURN, 0, 0, 0),
    ]
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// The kernel's list has a line for each socket: its family, its address, and its first 32
    /// groups.
    #[tokio::test]
    async fn sockets_have_address_and_groups() {
        let mut news = RuleChanges::subscribe();
        assert!(!news.0.is_empty(), "every kernel reports routing rules");
        let list = fs::read_to_string("/proc/thread-self/net/netlink").unwrap();
        for heard in &mut news.0 {
            let mut address = SocketAddr::new(0, 0);
            heard
                .connection
                .socket_mut()
                .socket_mut()
                .get_address(&mut address)
                .unwrap();
            let address = address.port_number().to_string();
            let is_own = |line: &&str| line.split_whitespace().nth(2) == Some(&address);
            let own: Vec<_> = list.lines().filter(is_own).collect();
            assert!(
                address != "0"
                    && own
                        .iter()
                        .any(|line| line.split_whitespace().nth(3) != Some("00000000")),
                "{own:?}"
            );
        }
    }
}

//! The anchor pair: creation, takeover, removal.

use std::fs;

use anyhow::{Context, Result, ensure};
use proxy_net::anchor::{self, Anchor, Ensured};

use crate::net::{handle, in_netns, ip, ip_json, sysctl};

#[test]
fn the_anchor_is_made_once_and_removed_without_trace() {
    for accept_local in ["0", "1"] {
        in_netns(async move {
            fs::write("/proc/sys/net/ipv4/conf/lo/accept_local", accept_local)?;
            let rp_filter = sysctl("ipv4/conf/default/rp_filter")?;
            let first = anchor::ensure(&handle()?, 1450).await?;
            ensure!(!first.was_up, "{first:?} of a new namespace");
            check_anchor(&first.anchor, 1450).await?;
            // The second call stands for a restarted agent.
            let second = anchor::ensure(&handle()?, 1400).await?;
            ensure!(
                matches!(second, Ensured { anchor, was_up: true, sysctls: 0 } if anchor == first.anchor),
                "{second:?} after {first:?}"
            );
            check_anchor(&second.anchor, 1400).await?;
            anchor::set_localhost(&handle()?, true).await?;
            anchor::set_localhost(&handle()?, true).await?;
            ensure!(
                sysctl("ipv4/conf/lo/route_localnet")? == "1"
                    && sysctl("ipv4/conf/all/route_localnet")? == "0"
            );
            ensure!(
                sysctl("ipv4/conf/kpx0/rp_filter")? == rp_filter,
                "rp_filter is not ours to set"
            );

            anchor::remove(&handle()?).await?;
            ensure!(
                names().await? == ["lo"],
                "left behind: {:?}",
                names().await?
            );
            ensure!(
                sysctl("ipv4/conf/lo/accept_local")? == accept_local,
                "accept_local was {accept_local}"
            );
            ensure!(
                sysctl("ipv4/conf/lo/route_localnet")? == "0",
                "route_localnet was 0"
            );
            anchor::remove(&handle()?)
                .await
                .context("remove what is not there")
        });
    }
}

#[test]
fn the_anchor_takes_over_a_pair_and_nothing_else() {
    in_netns(async {
        ip("link add kpx0 type veth peer name kpx1").await?;
        check_anchor(&anchor::ensure(&handle()?, 1500).await?.anchor, 1500).await?;
        anchor::remove(&handle()?).await?;

        for (stranger, name) in [
            ("link add kpx0 type bridge", "kpx0"),
            ("link add kpx0 type veth peer name other", "kpx0"),
            ("link add kpx1 type bridge", "kpx1"),
        ] {
            ip(stranger).await?;
            let error = anchor::ensure(&handle()?, 1500)
                .await
                .err()
                .context(stranger)?;
            ensure!(
                format!("{error:#}").contains("kpx0/kpx1"),
                "{stranger}: {error:#}"
            );
            ensure!(
                names().await?.contains(&name.to_owned()),
                "{stranger}: deleted"
            );
            ip(&format!("link del {name}")).await?;
        }
        Ok(())
    });
}

#[test]
fn the_anchor_comes_up_where_ipv6_is_off() {
    in_netns(async {
        for device in ["all", "default", "lo"] {
            fs::write(
                format!("/proc/sys/net/ipv6/conf/{device}/disable_ipv6"),
                "1",
            )?;
        }
        check_anchor(&anchor::ensure(&handle()?, 1500).await?.anchor, 1500).await
    });
}

async fn check_anchor(anchor: &Anchor, mtu: u64) -> Result<()> {
    for name in ["kpx0", "kpx1"] {
        let link = &ip_json(&format!("-d link show {name}")).await?[0];
        let flags = link["flags"].as_array().context("no flags")?;
        ensure!(
            ["NOARP", "UP", "LOWER_UP"]
                .iter()
                .all(|flag| flags.contains(&(*flag).into())),
            "{name}: {link}"
        );
        ensure!(
            link["mtu"] == mtu && link["inet6_addr_gen_mode"] == "none",
            "{name}: {link}"
        );
        if name == "kpx0" {
            ensure!(
                link["ifindex"] == anchor.ifindex && link["link"] == "kpx1",
                "{link}"
            );
            let mac = anchor.mac.map(|byte| format!("{byte:02x}")).join(":");
            ensure!(link["address"] == mac.as_str(), "{link}, not {mac}");
        }
        let addrs = &ip_json(&format!("addr show {name}")).await?[0]["addr_info"];
        ensure!(
            addrs.as_array().is_some_and(Vec::is_empty),
            "{name} has addresses: {addrs}"
        );
    }
    for (key, want) in [
        ("ipv4/conf/lo/accept_local", "1"),
        ("ipv4/conf/kpx0/forwarding", "1"),
        ("ipv4/conf/kpx0/src_valid_mark", "1"),
        ("ipv4/conf/kpx1/forwarding", "0"),
        ("ipv6/conf/kpx0/forwarding", "1"),
        ("ipv6/conf/kpx0/accept_ra", "0"),
        ("ipv6/conf/kpx1/disable_ipv6", "1"),
    ] {
        ensure!(sysctl(key)? == want, "{key} is {}", sysctl(key)?);
    }
    Ok(())
}

async fn names() -> Result<Vec<String>> {
    let links = ip_json("link show").await?;
    Ok(links
        .as_array()
        .context("no list")?
        .iter()
        .filter_map(|link| Some(link["ifname"].as_str()?.into()))
        .collect())
}

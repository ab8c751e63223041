//! Routes: kpx's through the anchor, and the default route.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures::poll;
use proxy_common::addr::{Addr4, Addr6};
use proxy_net::addr::default_route;
use proxy_net::anchor;
use proxy_net::connect;
use proxy_net::route::{MAIN, Report, Route, Routes};
use serde_json::Value;

use crate::net::{handle, in_netns, ip, ip_json, node};

#[test]
fn routes_are_what_is_wanted_and_foreign_ones_stay() {
    in_netns(async {
        node().await?;
        let handle = handle()?;
        let anchor = anchor::ensure(&handle, 1500).await?.anchor;
        ip("route add 10.97.0.1 via 192.0.2.254").await?;
        ip("route add 203.0.113.0/24 dev kpx0 proto static").await?;
        ip("-6 route add 2001:db8:9::/48 dev kpx0").await?;
        let mut routes = Routes::open(handle.clone(), MAIN, anchor.ifindex).await?;

        let want = wanted(&[
            ("10.96.0.0/16", Some("192.0.2.1")),
            ("198.51.100.7/32", Some("192.0.2.1")),
            ("fd00:10:96::/108", Some("fd00::1")),
            ("2001:db8::7/128", None),
        ]);
        let report = routes.reconcile(&want).await?;
        ensure!(
            report
                == Report {
                    added: 4,
                    ..Report::default()
                },
            "{report:?}"
        );
        let all = [
            "10.96.0.0/16 src 192.0.2.1",
            "198.51.100.7 src 192.0.2.1",
            "2001:db8::7 src -",
            "fd00:10:96::/108 src fd00::1",
        ];
        ensure!(ours().await? == all, "{:?}", ours().await?);
        ensure!(
            routes.reconcile(&want).await? == Report::default(),
            "not idle"
        );
        let mut next_agent = Routes::open(handle.clone(), MAIN, anchor.ifindex).await?;
        ensure!(
            next_agent.reconcile(&want).await? == Report::default(),
            "the next agent does it all again"
        );

        let fewer = wanted(&[
            ("10.96.0.0/16", Some("192.0.2.1")),
            ("fd00:10:96::/108", Some("fd00::1")),
        ]);
        let report = routes.reconcile(&fewer).await?;
        ensure!(
            report
                == Report {
                    deleted: 2,
                    ..Report::default()
                },
            "{report:?}"
        );
        ensure!(ours().await? == [all[0], all[3]], "{:?}", ours().await?);

        ip("route del 10.96.0.0/16").await?;
        ip("-6 route del fd00:10:96::/108").await?;
        ensure!(
            routes.reconcile(&fewer).await? == Report::default(),
            "it asks the kernel each time"
        );
        let report = routes.verify(&fewer).await?;
        ensure!(
            report
                == Report {
                    added: 2,
                    ..Report::default()
                },
            "{report:?}"
        );
        ensure!(ours().await? == [all[0], all[3]], "{:?}", ours().await?);

        // A foreign program has deleted the route already: kpx ignores that.
        ip("route del 10.96.0.0/16").await?;
        let report = routes.reconcile(&wanted(&[])).await?;
        ensure!(
            report
                == Report {
                    deleted: 2,
                    ..Report::default()
                },
            "{report:?}"
        );
        ensure!(ours().await?.is_empty());
        for foreign in ["10.97.0.1", "203.0.113.0/24", "2001:db8:9::/48"] {
            ensure!(route(foreign).await?.is_some(), "{foreign} is gone");
        }
        Ok(())
    });
}

#[test]
fn routes_follow_the_nodes_address() {
    in_netns(async {
        node().await?;
        let handle = handle()?;
        let anchor = anchor::ensure(&handle, 1500).await?.anchor;
        let mut routes = Routes::open(handle.clone(), MAIN, anchor.ifindex).await?;
        let of = |src4, src6| {
            wanted(&[
                ("10.96.0.0/16", Some(src4)),
                ("fd00:10:96::/108", Some(src6)),
            ])
        };
        routes.reconcile(&of("192.0.2.1", "fd00::1")).await?;

        // The sources are not assigned yet: the old routes stay, and the next pass retries.
        let report = routes.reconcile(&of("192.0.2.2", "fd00::2")).await?;
        ensure!(
            report.replaced == 0 && report.refused.len() == 2,
            "{report:?}"
        );
        ensure!(
            report
                .refused
                .iter()
                .all(|(_, why)| why.contains("no device has")),
            "{report:?}"
        );
        ensure!(ours().await? == ["10.96.0.0/16 src 192.0.2.1", "fd00:10:96::/108 src fd00::1"]);
        ip("addr add 192.0.2.2/24 dev eth0").await?;
        ip("addr add fd00::2/64 dev eth0 nodad").await?;
        let report = routes.reconcile(&of("192.0.2.2", "fd00::2")).await?;
        ensure!(
            report
                == Report {
                    replaced: 2,
                    ..Report::default()
                },
            "{report:?}"
        );
        let both = ["10.96.0.0/16 src 192.0.2.2", "fd00:10:96::/108 src fd00::2"];
        ensure!(ours().await? == both, "{:?}", ours().await?);

        // The kernel drops the IPv4 route and takes the source from the IPv6 route.
        ip("addr del 192.0.2.2/24 dev eth0").await?;
        ip("addr del fd00::2/64 dev eth0").await?;
        ensure!(
            ours().await? == ["fd00:10:96::/108 src -"],
            "{:?}",
            ours().await?
        );
        ip("addr add 192.0.2.2/24 dev eth0").await?;
        ip("addr add fd00::2/64 dev eth0 nodad").await?;
        let report = routes.verify(&of("192.0.2.2", "fd00::2")).await?;
        ensure!(
            report
                == Report {
                    added: 1,
                    replaced: 1,
                    ..Report::default()
                },
            "{report:?}"
        );
        ensure!(ours().await? == both, "{:?}", ours().await?);
        Ok(())
    });
}

#[test]
fn a_refused_route_costs_only_itself() {
    in_netns(async {
        node().await?;
        let handle = handle()?;
        let anchor = anchor::ensure(&handle, 1500).await?.anchor;
        let mut routes = Routes::open(handle.clone(), MAIN, anchor.ifindex).await?;
        ip("route add 10.96.0.5 dev eth0").await?;
        ip("-6 route add fd00:10:96::5 dev eth0").await?;
        let want = wanted(&[
            ("10.96.0.4/32", None),
            ("10.96.0.5/32", None),
            ("10.96.0.6/32", None),
            ("fd00:10:96::4/128", None),
            ("fd00:10:96::5/128", None),
            ("fd00:10:96::6/128", None),
        ]);
        let report = routes.reconcile(&want).await?;
        ensure!(report.added == 4, "{report:?}");
        let refused: Vec<String> = report
            .refused
            .iter()
            .map(|(route, _)| route.dst.to_string())
            .collect();
        ensure!(
            refused == ["10.96.0.5/32", "fd00:10:96::5/128"],
            "{report:?}"
        );
        ensure!(
            route("10.96.0.5").await?.context("gone")?["dev"] == "eth0",
            "somebody else's route was replaced"
        );
        ensure!(
            route("fd00:10:96::5").await?.context("gone")?["dev"] == "eth0",
            "somebody else's route was replaced"
        );

        ip("route del 10.96.0.5").await?;
        ip("-6 route del fd00:10:96::5").await?;
        let report = routes.reconcile(&want).await?;
        ensure!(
            report
                == Report {
                    added: 2,
                    ..Report::default()
                },
            "{report:?}"
        );
        ensure!(ours().await?.len() == 6);
        Ok(())
    });
}

#[test]
fn a_thousand_host_routes_are_written() {
    in_netns(async {
        node().await?;
        let handle = handle()?;
        let anchor = anchor::ensure(&handle, 1500).await?.anchor;
        let mut routes = Routes::open(handle.clone(), MAIN, anchor.ifindex).await?;
        let route = |i: u16| Route {
            dst: IpAddr::from([10, 96, (i >> 8) as u8, i as u8]).into(),
            src: None,
        };
        let mut want: BTreeSet<Route> = (0..1000).map(route).collect();
        ensure!(routes.reconcile(&want).await?.added == 1000);
        let mut delays = Vec::new();
        for more in 1_000..1_005 {
            let start = Instant::now();
            want.insert(route(more));
            ensure!(
                routes.reconcile(&want).await?
                    == Report {
                        added: 1,
                        ..Report::default()
                    }
            );
            delays.push(start.elapsed());
        }
        ensure!(
            delays.iter().min() < Some(&Duration::from_millis(50)),
            "one route more took {delays:?}"
        );
        ensure!(ours().await?.len() == 1_005);
        ensure!(routes.verify(&want).await? == Report::default());
        Ok(())
    });
}

/// The kernel refuses a second dump on a socket while a dump is in progress. The second request is
/// sent before the first answer is read.
#[test]
fn dumps_of_one_socket_wait_for_each_other() {
    in_netns(async {
        node().await?;
        let (connection, handle) = connect()?;
        let mut connection = Box::pin(connection);
        let mut list = Box::pin(default_route::<Addr4>(&handle));
        let mut beside = Box::pin(default_route::<Addr4>(&handle));
        for sent in [&mut list, &mut beside] {
            ensure!(poll!(sent).is_pending() && poll!(&mut connection).is_pending());
        }
        tokio::spawn(connection);
        let (list, beside) = tokio::join!(list, beside);
        ensure!(list?.is_none() && beside?.is_none());
        Ok(())
    });
}

#[test]
fn default_route_of_each_family_is_found() {
    in_netns(async {
        let handle = handle()?;
        ensure!(
            default_route::<Addr4>(&handle).await?.is_none(),
            "a namespace without routes has a default route"
        );
        ensure!(
            default_route::<Addr6>(&handle).await?.is_none(),
            "a namespace without routes has a default route"
        );
        node().await?;
        ip("link add eth9 type veth peer name peer9").await?;
        ip("link set eth9 up").await?;
        ip("addr add 198.51.100.9/24 dev eth9").await?;
        ip("addr add 2001:db8:9::9/64 dev eth9 nodad").await?;
        ip("route add default via 192.0.2.254 metric 200").await?;
        ip("route add default via 198.51.100.254 metric 100").await?;
        ip("-6 route add default via 2001:db8:9::1").await?;
        let eth9 = ip_json("link show eth9").await?[0]["ifindex"]
            .as_u64()
            .map(|index| index as u32);
        ensure!(eth9.is_some() && default_route::<Addr4>(&handle).await? == eth9);
        ensure!(default_route::<Addr6>(&handle).await? == eth9);
        Ok(())
    });
}

fn wanted(routes: &[(&str, Option<&str>)]) -> BTreeSet<Route> {
    let route = |(dst, src): &(&str, Option<&str>)| Route {
        dst: dst.parse().expect("a prefix"),
        src: src.map(|src| src.parse().expect("an address")),
    };
    routes.iter().map(route).collect()
}

/// Returns the routes with kpx's protocol number, as `ip` shows them, sorted.
async fn ours() -> Result<Vec<String>> {
    let mut ours = Vec::new();
    for family in ["-4", "-6"] {
        for route in ip_json(&format!("{family} route show proto 75"))
            .await?
            .as_array()
            .context("no list")?
        {
            ensure!(route["dev"] == "kpx0", "{route}");
            let text = |key: &str| route[key].as_str().unwrap_or("-").to_owned();
            ours.push(format!("{} src {}", text("dst"), text("prefsrc")));
        }
    }
    ours.sort();
    Ok(ours)
}

async fn route(dst: &str) -> Result<Option<Value>> {
    let family = if dst.contains(':') { "-6" } else { "-4" };
    Ok(ip_json(&format!("{family} route show {dst}"))
        .await?
        .get(0)
        .cloned())
}

//! Chains that refuse packets between outside clients and pods.

use super::*;

fn refusals(rules: Ruleset, pods: &str) -> Vec<(String, String)> {
    let netfilter = Netfilter {
        rules,
        legacy: Legacy::default(),
        follows: true,
        takes_up: true,
    };
    netfilter
        .refusals(&nets(pods))
        .into_iter()
        .map(|refusal| (refusal.why, refusal.remedy))
        .collect()
}

fn recorded(file: &str, pods: &str) -> Vec<(String, String)> {
    refusals(ruleset(&record::messages(file)).unwrap(), pods)
}

const DROPS: &str = "chain FORWARD of table ip filter drops packets that its rules do not accept";

#[test]
fn policies_count_unless_a_rule_accepts_pods() {
    let of = |remedy: &str| vec![(DROPS.to_owned(), remedy.to_owned())];
    let by_docker = "iptables-nft -I DOCKER-USER -d 10.244.1.0/24 -j ACCEPT; iptables-nft -I DOCKER-USER -s 10.244.1.0/24 -j ACCEPT";
    assert_eq!(recorded("docker-filter.iptables", PODS), of(by_docker));
    let by_ufw = "ufw route allow to PODS; ufw route allow from PODS";
    assert_eq!(recorded("ufw.iptables", "0.0.0.0/0"), of(by_ufw));
    for file in [
        "flannel-filter.iptables",
        "docker-flannel.iptables",
        "ufw-accept.iptables",
        "calico-filter.iptables",
    ] {
        assert_eq!(recorded(file, PODS), [], "{file}");
    }
    assert_eq!(
        recorded("docker-filter.iptables", "fd00:10:244:1::/64"),
        [],
        "the other family"
    );
}

#[test]
fn last_rules_without_conditions_count_as_policies() {
    let refuse = || Part::Refuse("reject the packet".to_owned());
    let chain = |rules| [super::chain("FWD", rules)].into();
    let why = "chain FWD of table ip nat refuses packets that its rules do not accept";
    let remedy = "nft insert rule ip nat FWD ip daddr 10.244.1.0/24 accept; nft insert rule ip nat FWD ip saddr 10.244.1.0/24 accept";
    assert_eq!(
        refusals(chain(vec![vec![refuse()]]), PODS),
        [(why.to_owned(), remedy.to_owned())]
    );
    let accepted = vec![
        vec![from(PODS), ACCEPT],
        vec![to(PODS), ACCEPT],
        vec![refuse()],
    ];
    assert_eq!(refusals(chain(accepted), PODS), []);
    assert_eq!(
        refusals(chain(vec![vec![to(PODS), ACCEPT], vec![refuse()]]), PODS).len(),
        1,
        "answers are refused"
    );
    assert_eq!(
        refusals(chain(vec![vec![from("192.0.2.0/24"), refuse()]]), PODS),
        [],
        "it is about some clients"
    );
}

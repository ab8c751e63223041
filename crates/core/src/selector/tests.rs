//! Tests that selectors match as in kubectl and the API server.

use proptest::prelude::*;
use serde_json::json;

use super::*;

fn labels(texts: &[(&str, &str)]) -> Labels {
    texts
        .iter()
        .map(|(key, value)| ((*key).into(), (*value).into()))
        .collect()
}

#[test]
fn text_selects_as_kubectl_does() {
    let pod = labels(&[
        ("k8s-app", "dns"),
        ("tier", "node"),
        ("example.com/empty", ""),
        ("rank", "7"),
    ]);
    for (text, selects) in [
        ("", true),
        ("k8s-app=dns", true),
        (" k8s-app == dns , tier=node", true),
        ("k8s-app=dns,tier=cluster", false),
        ("k8s-app!=web", true),
        ("k8s-app!=dns", false),
        ("missing!=web", true),
        ("tier in (node, cluster)", true),
        ("tier in (cluster)", false),
        ("missing in (node)", false),
        ("tier notin(node,cluster)", false),
        ("missing notin (node)", true),
        ("example.com/empty", true),
        ("example.com/empty=", true),
        ("example.com/empty=,tier", true),
        ("example.com/empty in (,a)", true),
        ("example.com/empty in ()", true),
        ("tier=", false),
        ("!missing", true),
        ("! tier", false),
        ("missing", false),
        ("rank>6,rank<8", true),
        ("rank > 7", false),
        ("tier>1", false),
        ("missing<1", false),
        ("in in (in)", false),
    ] {
        let selector = text
            .parse::<Selector>()
            .unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(selector.selects(&pod), selects, "{text}");
        assert_eq!(selector.to_string().parse(), Ok(selector), "{text}");
    }
}

#[test]
fn wrong_text_is_refused_with_its_part() {
    const KEY: &str = "expected [PREFIX/]NAME: PREFIX is a DNS subdomain, NAME has at most 63 letters, digits, '-', '_' and '.', with a \
                       letter or digit at both ends";
    const VALUE: &str = "at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends, or nothing, is expected";
    let long = "a".repeat(64);
    for (text, error) in [
        ("k8s-app=dns,", "found the end, expected: a key".to_owned()),
        (",a", "found \",\", expected: a key".to_owned()),
        ("=web", "found \"=\", expected: a key".to_owned()),
        ("!", "found the end, expected: a key".to_owned()),
        ("!a=b", "found \"=\", expected: ',' or the end".to_owned()),
        (
            "a b",
            "found \"b\", expected: one of in, notin, =, ==, !=, >, <".to_owned(),
        ),
        (
            "a on (b)",
            "found \"on\", expected: one of in, notin, =, ==, !=, >, <".to_owned(),
        ),
        ("a=b c", "found \"c\", expected: ',' or the end".to_owned()),
        ("a=(b)", "found \"(\", expected: a value".to_owned()),
        ("a in b", "found \"b\", expected: '('".to_owned()),
        ("a in (b", "found the end, expected: ',' or ')'".to_owned()),
        ("a in (b c)", "found \"c\", expected: ',' or ')'".to_owned()),
        ("a in b)", "found \"b\", expected: '('".to_owned()),
        (
            "a in (b))",
            "found \")\", expected: ',' or the end".to_owned(),
        ),
        ("a>b", "found \"b\", expected: an integer".to_owned()),
        ("-a", format!("invalid key \"-a\": {KEY}")),
        ("a/b/c=d", format!("invalid key \"a/b/c\": {KEY}")),
        ("App_/x=y", format!("invalid key \"App_/x\": {KEY}")),
        ("/x", format!("invalid key \"/x\": {KEY}")),
        ("x/", format!("invalid key \"x/\": {KEY}")),
        (&long, format!("invalid key \"{long}\": {KEY}")),
        (
            "{\"a\":\"b\"}",
            format!("invalid key \"{{\\\"a\\\":\\\"b\\\"}}\": {KEY}"),
        ),
        ("a=-b", format!("invalid value \"-b\": {VALUE}")),
        ("a in (b,c/d)", format!("invalid value \"c/d\": {VALUE}")),
    ] {
        assert_eq!(text.parse::<Selector>(), Err(error), "{text}");
    }
}

#[test]
fn selector_of_the_api_selects_as_its_text_does() {
    let read = |selector| Selector::of(&serde_json::from_value(selector).unwrap());
    let both = json!({
        "matchLabels": { "k8s-app": "dns" },
        "matchExpressions": [
            { "key": "tier", "operator": "In", "values": ["a", "b"] },
            { "key": "old", "operator": "DoesNotExist" },
        ],
    });
    assert_eq!(read(both), "k8s-app=dns,tier in (a,b),!old".parse());
    assert!(read(json!({})).unwrap().selects(&labels(&[])));
    let wrong =
        |operator: &str| json!({ "matchExpressions": [{ "key": "tier", "operator": operator }] });
    assert_eq!(
        read(wrong("In")),
        Err("matchExpressions[0]: has no values".to_owned())
    );
    let why =
        "matchExpressions[0]: operator \"Like\" is not one of In, NotIn, Exists, DoesNotExist";
    assert_eq!(read(wrong("Like")), Err(why.to_owned()));
    let key = read(json!({ "matchLabels": { "-": "dns" } })).unwrap_err();
    assert!(key.starts_with("matchLabels: invalid key \"-\": "), "{key}");
}

proptest! {
    #[test]
    fn text_is_read_as_it_is_written(text in "[-a-z0-9/.=!(), <>]{0,24}") {
        if let Ok(selector) = text.parse::<Selector>() {
            prop_assert_eq!(selector.to_string().parse(), Ok(selector));
        }
    }
}

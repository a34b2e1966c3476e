//! Errors of the build for the public API: methods without a rule or with one that their messages
//! contradict, and parts without a comment.

// Parts of the build script, which is no library.
#[path = "../build"]
mod build {
    pub(super) mod comments;
    pub(super) mod rules;
}

use build::{comments, rules};
use protox::{
    Compiler, Error,
    file::{ChainFileResolver, File, FileResolver, GoogleFileResolver, IncludeFileResolver},
    prost_reflect::DescriptorPool,
};

const FILE: &str = "vmmd/v1/tested.proto";

/// One file that is not on a disk.
struct Text(String);

impl FileResolver for Text {
    fn open_file(&self, name: &str) -> Result<File, Error> {
        match name {
            FILE => File::from_source(name, &self.0),
            other => Err(Error::file_not_found(other)),
        }
    }
}

/// The public API with `content` in a file of its own.
fn with(content: &str) -> DescriptorPool {
    let head =
        r#"syntax = "proto3"; package vmmd.v1; import "vmmd/v1/meta.proto"; import "vmmd/v1/rule.proto";"#;
    let mut files = ChainFileResolver::new();
    files.add(Text(format!("{head}\n{content}")));
    files.add(IncludeFileResolver::new(
        concat!(env!("CARGO_MANIFEST_DIR"), "/..").into(),
    ));
    files.add(GoogleFileResolver::new());
    let mut compiler = Compiler::with_file_resolver(files);
    compiler.include_imports(true).include_source_info(true);
    compiler.open_file(FILE).unwrap();
    compiler.descriptor_pool()
}

/// A service of one method with these options and these fields of its request.
fn service(options: &str, fields: &str) -> String {
    format!(
        "service Tested {{ rpc Act(ActRequest) returns (ActResponse) {{ {options} }} }}\n\
         message ActRequest {{ {fields} }} message ActResponse {{}}"
    )
}

#[test]
fn a_method_without_a_rule_or_with_one_that_its_messages_contradict_is_refused() {
    let id = "string request_id = 15;";
    let preconditions = "Preconditions preconditions = 14;";
    for (options, fields, problem) in [
        ("", String::new(), "has no rule"),
        ("effect: METHOD_EFFECT_READ", String::new(), "says no role"),
        ("role: ROLE_VIEWER", String::new(), "says no effect"),
        (
            "role: ROLE_ADMIN, effect: METHOD_EFFECT_CHANGE, kind: \"vm\"",
            preconditions.to_owned(),
            "takes no request_id",
        ),
        (
            "role: ROLE_ADMIN, effect: METHOD_EFFECT_CHANGE, kind: \"vm\"",
            id.to_owned(),
            "takes no `Preconditions",
        ),
        (
            "role: ROLE_VIEWER, effect: METHOD_EFFECT_READ",
            id.to_owned(),
            "has a request_id",
        ),
        (
            "role: ROLE_ADMIN, effect: METHOD_EFFECT_CHANGE",
            format!("{preconditions} {id}"),
            "does not say what kind of thing",
        ),
        (
            "role: ROLE_VIEWER, effect: METHOD_EFFECT_READ, kind: \"vm\", name_field: \"nobody\"",
            String::new(),
            "nobody",
        ),
    ] {
        let rule = match options {
            "" => String::new(),
            options => format!("option (rule) = {{{options}}};"),
        };
        let refused = rules::generate(&with(&service(&rule, &fields))).unwrap_err();
        assert!(
            refused.contains("Tested.Act") && refused.contains(problem),
            "{options}: {refused}"
        );
    }
    let rule = "option (rule) = {role: ROLE_ADMIN, effect: METHOD_EFFECT_CHANGE, kind: \"vm\", name_field: \"name\"};";
    let fields = format!("string name = 1; {preconditions} {id}");
    let table = rules::generate(&with(&service(rule, &fields))).unwrap();
    assert!(table.contains("vmmd.v1.Tested/Act"), "{table}");
    let rule = "option (rule) = {role: ROLE_VIEWER, agents: true, effect: METHOD_EFFECT_READ};";
    let table = rules::generate(&with(&service(rule, ""))).unwrap();
    assert!(table.contains("agents: true"), "{table}");
    let of_peers = service(rule, "").replace("service Tested", "service PeerService");
    let refused = rules::generate(&with(&of_peers)).unwrap_err();
    assert!(refused.contains("lets agents call"), "{refused}");
}

#[test]
fn a_part_of_the_api_without_a_comment_is_refused() {
    let refused = comments::check(&with(
        "// Said.\nmessage Said {\n  // Said.\n  string said = 1;\n  string unsaid = 2;\n}",
    ));
    let refused = refused.unwrap_err();
    assert!(
        refused.contains("Said.unsaid") && !refused.contains("Said.said"),
        "{refused}"
    );
    comments::check(&with(
        "// Said.\nmessage Said {\n  // Said.\n  string said = 1;\n}",
    ))
    .unwrap();
}
